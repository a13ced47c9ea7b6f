"""A function or module as a flat program: state and inputs in as tensors, tensors out, nothing hidden.

What a function computes with besides its inputs (parameters, buffers, tensors it closes over) is its
*state*. Left inside a compiled program, small tensors of it would be baked in as constants, and a later
update would be missed without a word; so all of it becomes inputs of the program.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ridgeline.capture.casts import fresh_casts
from ridgeline.capture.interception import scripted_as_written
from ridgeline.capture.mask_looks import spare_looks
from ridgeline.capture.stand_ins import (
    Memory,
    StandIns,
    lifted_function,
    memory_of,
    take_grads,
    used_tensors,
)
from ridgeline.errors import CaptureError, first_line
from ridgeline.reach.owners import innermost_outside
from ridgeline.tensors.copies import strided_copy

Constant = None | bool | int | float | str
"""What may stand in an output besides tensors; it is the same for every call."""


class FlatProgram(NamedTuple):
    """A traced function.

    Attributes:
        graph: `graph(*state, *inputs)` returns the list of output tensors; tensors that the function
            updates in place are updated.
        state: The tensors that the function uses besides its inputs, by name: those of a module by
            theirs, others `tensor_0`, `tensor_1`, ... in the order of first use. They are the very
            tensors, not copies.
        inputs: The tensors of the example inputs, in order.
        input_tree: Structure of the arguments of a call.
        output_tree: Structure of what a call returns.
        outputs: The tensors that it returns, without data.
        constants: Leaf of the output structure to its value, for those that are no tensors.
        grads: State whose `.grad` the function sets (it was None before), by name. The graph returns the
            gradients behind the outputs.
        is_differentiable: Whether what the function returns can be differentiated further. What the
            program returns never can.
    """

    graph: GraphModule
    state: dict[str, Tensor]
    inputs: list[Tensor]
    input_tree: pytree.TreeSpec
    output_tree: pytree.TreeSpec
    outputs: list[Tensor]
    constants: dict[int, Constant]
    grads: tuple[str, ...] = ()
    is_differentiable: bool = False

    @property
    def device(self) -> torch.device:
        """Where all its tensors are."""
        return [*self.state.values(), *self.inputs][0].device


def as_arguments(example_inputs: Any) -> tuple[Any, ...]:
    """The positional arguments: a tuple as it is, anything else as the only one."""
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)


def flatten_program(
    fn: Callable[..., Any], example_inputs: Any, *, gradients: bool = False, one_device: bool = True
) -> FlatProgram:
    """Trace a function or module, for inputs like these.

    Nothing runs: tracing uses tensors without data, so state and random state stay as they are.

    Args:
        fn: Function or module.
        example_inputs: A tuple of positional arguments (nests of tensors), or the only argument.
        gradients: Trace under the caller's gradient mode, so that `torch.autograd.grad` inside the function
            becomes part of the program; otherwise without gradients.
        one_device: Refuse tensors on several devices.

    Raises:
        CaptureError: an input is no tensor, an output is neither tensor nor plain constant, tensors are on
            several devices, the function depends on the values of tensors or writes `.grad` of one.
    """
    spare_looks()
    leaves, input_tree = pytree.tree_flatten(as_arguments(example_inputs))
    _check_tensors(leaves)
    # Copies: a tensor given twice, or also closed over, must become inputs of their own.
    inputs = [strided_copy(leaf) for leaf in leaves]
    needed = [leaf.requires_grad and gradients and torch.is_grad_enabled() for leaf in leaves]
    returned: dict[str, Any] = {}

    def flat(stand_ins: StandIns, given: list[Any]) -> list[Any]:
        given = [new.requires_grad_(grad) for new, grad in zip(given, needed, strict=True)]
        with _tracing(gradients), stand_ins:
            output = fn(*pytree.tree_unflatten(given, input_tree))
        outputs, returned["tree"] = pytree.tree_flatten(output)
        returned["constants"] = {i: o for i, o in enumerate(outputs) if not isinstance(o, Tensor)}
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        if gradients:
            _check_computed(tensors)
        taken = take_grads(stand_ins.used, given)
        returned["grads"] = tuple(taken)
        if "is_differentiable" not in returned:  # once: it uses up what backward needs
            with _tracing(gradients), stand_ins:
                returned["is_differentiable"] = _is_differentiable(tensors)
        return [tensor.detach() if gradients else tensor for tensor in (*tensors, *taken.values())]

    try:
        found = used_tensors(flat, inputs)
        graph = make_fx(lifted_function(flat, found), tracing_mode="fake")(*found.values(), *inputs)
    except RuntimeError as error:
        raise _refusal(fn, error) from error
    names = dict(zip(found, _state_names(fn, found), strict=True))
    state = {names[key]: tensor for key, tensor in found.items()}
    if one_device:
        _check_one_device(state, inputs)
    # Of the graph that is kept: tensors without data of the first trace belong to another mode.
    values = [node.meta["val"] for node in pytree.tree_leaves(graph.graph.output_node().args)]
    return FlatProgram(
        graph=graph,
        state=state,
        inputs=inputs,
        input_tree=input_tree,
        output_tree=returned["tree"],
        outputs=values[: len(values) - len(returned["grads"])],
        constants=_plain(returned["constants"], fn),
        grads=tuple(names[key] for key in returned["grads"]),
        is_differentiable=returned["is_differentiable"],
    )


def _check_tensors(leaves: list[Any]) -> None:
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise CaptureError(
                f"wanted example inputs made of tensors, got {leaf!r} as leaf {index}; fix what is not a "
                "tensor with functools.partial or a lambda"
            )


@contextlib.contextmanager
def _tracing(gradients: bool) -> Iterator[None]:
    """With gradients: the caller's gradient mode, and backward in this thread, where the stand-ins are."""
    with (
        torch.set_grad_enabled(gradients and torch.is_grad_enabled()),
        torch.autograd.set_multithreading_enabled(False),
        fresh_casts(),
        scripted_as_written(),
    ):
        yield


def _check_computed(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"wanted results that are computed, got a tensor of shape {tuple(tensor.shape)} that the "
                "function holds itself (a parameter, a buffer); return a clone of it, or read it there"
            )


def _is_differentiable(tensors: list[Tensor]) -> bool:
    """Whether what backward needs is still there: a function that went backward itself has used it up."""
    roots = [tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is not None]
    leaves = _leaves(roots)
    if not leaves:
        return any(tensor.requires_grad for tensor in tensors)
    try:
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, leaves, ones, allow_unused=True)
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        return False
    return True


def _leaves(roots: list[Tensor]) -> list[Tensor]:
    """The tensors at which the graph of these ends."""
    seen: set[Any] = set()
    leaves: list[Tensor] = []
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        # Of the class: an `autograd.Function` may keep one under that name.
        if hasattr(type(function), "variable"):
            leaves.append(function.variable)
        stack.extend(parent for parent, _ in function.next_functions)
    return leaves


def _state_names(fn: Callable[..., Any], state: dict[Memory, Tensor]) -> list[str]:
    names: dict[Memory, str] = {}
    if isinstance(fn, nn.Module):
        for source in (fn.named_parameters(), fn.named_buffers()):
            for name, tensor in source:
                names.setdefault(memory_of(tensor), name)
    taken = set(names.values())
    free = (name for index in count() if (name := f"tensor_{index}") not in taken)
    return [names.get(key) or next(free) for key in state]


def _check_one_device(state: dict[str, Tensor], inputs: list[Tensor]) -> None:
    named = {**{f"input {index}": t for index, t in enumerate(inputs)}, **state}
    places: dict[torch.device, str] = {}
    for name, tensor in named.items():
        places.setdefault(tensor.device, name)
    if len(places) != 1:
        got = ", ".join(f"{name} on {device}" for device, name in places.items()) or "no tensor"
        raise CaptureError(
            f"wanted all tensors of a program on one device, got {got}; move them with .to(device) first"
        )


def _plain(constants: dict[int, Any], fn: Callable[..., Any]) -> dict[int, Constant]:
    for value in constants.values():
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise CaptureError(
                f"wanted {name_of(fn)} to return tensors, numbers, texts or None in tuples, lists and dicts, "
                f"got {type(value).__name__}; return its tensors"
            )
    return constants


def _refusal(fn: Callable[..., Any], error: RuntimeError) -> CaptureError:
    line = innermost_outside(error.__traceback__)
    where = f"{Path(line.filename).name}:{line.lineno} in {line.name}" if line else "inside torch"
    return CaptureError(
        f"wanted to trace {name_of(fn)} into a program, got {type(error).__name__}: {first_line(error)} "
        f"({where}); shapes and control flow must not depend on the values of tensors "
        "(.item(), if tensor: ..., x[mask])"
    )


def name_of(fn: Callable[..., Any]) -> str:
    """What messages and reports call a function."""
    return getattr(fn, "__name__", type(fn).__name__)
