"""A function or module as a flat program: state and inputs in as tensors, tensors out, nothing hidden.

What a function computes with besides its inputs (parameters, buffers, tensors it closes over) is its
*state*. Left inside a compiled program, small tensors of it would be baked in as constants, and a later
update would be missed without a word; so all of it becomes inputs of the program.
"""

import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import CaptureError

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
    """

    graph: GraphModule
    state: dict[str, Tensor]
    inputs: list[Tensor]
    input_tree: pytree.TreeSpec
    output_tree: pytree.TreeSpec
    outputs: list[Tensor]
    constants: dict[int, Constant]

    @property
    def device(self) -> torch.device:
        """Where all its tensors are."""
        return [*self.state.values(), *self.inputs][0].device


def as_arguments(example_inputs: Any) -> tuple[Any, ...]:
    """The positional arguments: a tuple as it is, anything else as the only one."""
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)


def flatten_program(fn: Callable[..., Any], example_inputs: Any) -> FlatProgram:
    """Trace a function or module without gradients, for inputs like these.

    Nothing runs: tracing uses tensors without data, so state and random state stay as they are.

    Args:
        fn: Function or module.
        example_inputs: A tuple of positional arguments (nests of tensors), or the only argument.

    Raises:
        CaptureError: an input is no tensor, an output is neither tensor nor plain constant, tensors are on
            several devices, or the function depends on the values of tensors.
    """
    leaves, input_tree = pytree.tree_flatten(as_arguments(example_inputs))
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise CaptureError(
                f"wanted example inputs made of tensors, got {leaf!r} as leaf {index}; fix what is no tensor "
                "with functools.partial or a lambda"
            )
    # Copies: a tensor given twice, or also closed over, must become inputs of their own.
    inputs = [leaf.detach().clone() for leaf in leaves]
    returned: dict[str, Any] = {}

    def flat(stand_ins: "_StandIns", given: list[Any]) -> list[Any]:
        with torch.no_grad(), stand_ins:
            output = fn(*pytree.tree_unflatten(given, input_tree))
        outputs, returned["tree"] = pytree.tree_flatten(output)
        returned["constants"] = {i: o for i, o in enumerate(outputs) if not isinstance(o, Tensor)}
        return [output for output in outputs if isinstance(output, Tensor)]

    try:
        found = _used_tensors(flat, inputs)
        graph = make_fx(_lifted(flat, list(found)), tracing_mode="fake")(*found.values(), *inputs)
    except RuntimeError as error:
        raise CaptureError(
            f"wanted to trace {_name(fn)} into a program, got {type(error).__name__}: {_first_line(error)} "
            f"({_user_line(error)}); shapes and control flow must not depend on the values of tensors "
            "(.item(), if tensor: ..., x[mask])"
        ) from error
    state = dict(zip(_state_names(fn, found), found.values(), strict=True))
    _check_one_device(state, inputs)
    return FlatProgram(
        graph=graph,
        state=state,
        inputs=inputs,
        input_tree=input_tree,
        output_tree=returned["tree"],
        outputs=[node.meta["val"] for node in pytree.tree_leaves(graph.graph.output_node().args)],
        constants=_plain(returned["constants"], fn),
    )


class _StandIns(TorchDispatchMode):
    """Hands each operator a stand-in for every real tensor that the function uses besides its inputs."""

    def __init__(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _MAKES_CONSTANT:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Tensor, self._replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replace(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._stand_in(tensor)


_MAKES_CONSTANT = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""`torch.tensor([1.0, 2.0])` in a function makes a tensor of these values in every call: a true constant."""


_Memory = tuple[Any, ...]


def _memory(tensor: Tensor) -> _Memory:
    """What makes two tensor objects the same variable: `weight` and `weight.data` are."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def _used_tensors(flat: Callable[..., Any], inputs: list[Tensor]) -> dict[_Memory, Tensor]:
    """The tensors that the function uses besides its inputs, in the order of first use."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found: dict[_Memory, Tensor] = {}
    fakes: dict[_Memory, Tensor] = {}

    def stand_in(real: Tensor) -> Tensor:
        key = _memory(real)
        if key not in found:
            # Kept, so that no other tensor gets the same memory meanwhile.
            found[key], fakes[key] = real, mode.from_tensor(real)
        return fakes[key]

    stand_ins = [mode.from_tensor(tensor) for tensor in inputs]
    versions = [tensor._version for tensor in stand_ins]  # noqa: SLF001 (how often it was written to)
    with mode:
        flat(_StandIns(stand_in), list(stand_ins))
    for index, (tensor, version) in enumerate(zip(stand_ins, versions, strict=True)):
        if tensor._version != version:  # noqa: SLF001
            raise CaptureError(
                f"wanted a function that leaves its inputs as they are, got one that updates input {index} "
                "in place; clone the input first, or close over a tensor that is to be updated"
            )
    return found


def _lifted(flat: Callable[..., Any], keys: list[_Memory]) -> Callable[..., list[Any]]:
    """The function with the tensors that it uses as its first arguments."""

    def lifted(*tensors: Tensor) -> list[Any]:
        given = dict(zip(keys, tensors, strict=False))

        def stand_in(real: Tensor) -> Tensor:
            if _memory(real) not in given:
                raise CaptureError(
                    "wanted a function that uses the same tensors in every call, got one that used a new "
                    f"{tuple(real.shape)} tensor in its second; keep one tensor, and write new values into it"
                )
            return given[_memory(real)]

        return flat(_StandIns(stand_in), list(tensors[len(keys) :]))

    return lifted


def _state_names(fn: Callable[..., Any], state: dict[_Memory, Tensor]) -> list[str]:
    names: dict[_Memory, str] = {}
    if isinstance(fn, nn.Module):
        for source in (fn.named_parameters(), fn.named_buffers()):
            for name, tensor in source:
                names.setdefault(_memory(tensor), name)
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
                f"wanted {_name(fn)} to return tensors, numbers, texts or None in tuples, lists and dicts, "
                f"got {type(value).__name__}; return its tensors"
            )
    return constants


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _user_line(error: BaseException) -> str:
    """The innermost line of the traceback that is neither torch's nor ours."""
    foreign = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(foreign):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return "inside torch"
