"""What stands between a program and torch's operators, and captured programs pass by.

A `TorchDispatchMode` may change what any operator gives (`FakeTensorMode` is one), a transform of
`torch.func` computes something else with it, and forward-mode differentiation hands tangents along. torch's
compiler reads through a `TorchFunctionMode`, and compares which there are; through these it does not. And the
executor of TorchScript runs operators of its own.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ridgeline.errors import CaptureError

MODES = "under a TorchDispatchMode, which sees each operator, ran as they were written"
TRANSFORMS = (
    "inside of forward-mode differentiation or a transform of torch.func ran as they were written"
)

num_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - there is no public name
innermost_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001 - nor for this


def level_of_tangents() -> int:
    """How deep in forward-mode differentiation this is; -1 outside of it."""
    return forward_ad._current_level  # noqa: SLF001 - there is no public name


def intercepted() -> str:
    """What is between this thread's program and its operators, as the end of a note; empty if nothing is."""
    if num_dispatch_modes():
        return MODES
    is_transformed = innermost_transform() is not None or level_of_tangents() >= 0
    return TRANSFORMS if is_transformed else ""


def is_special(leaf: Any) -> bool:
    """Whether it is a tensor with operators of its own, which captured code would pass by."""
    return isinstance(leaf, Tensor) and type(leaf) not in (Tensor, nn.Parameter)


def has_functions(leaf: Any) -> bool:
    """Whether it is one with a `__torch_function__` of its own; those of torch keep the class."""
    own = getattr(type(leaf), "__torch_function__", None)
    package = str(getattr(own, "__module__", None) or "torch").partition(".")[0]
    return package != "torch" and is_special_to_compiler(leaf)


def is_special_to_compiler(leaf: Any) -> bool:
    """Whether it is one, and none around others that torch's compiler can read through (as `DTensor` is)."""
    return is_special(leaf) and not is_traceable_wrapper_subclass(leaf)


@contextlib.contextmanager
def scripted_as_written() -> Iterator[None]:
    """Inside, what `torch.jit.script` was given is called in place of what it made, as by torch's compiler.

    TorchScript's operators make tensors of sizes that a trace cannot read, as those of Python can be. And on
    a GPU its executor fuses operators after some calls, into kernels that read memory as it is: on tensors
    without memory, of which a trace is made, the device would be lost. Methods of scripted modules, of whose
    source nothing is kept, are not called there. A scripted function is its own copy, as others are.

    Raises:
        CaptureError: from a call of such a method with tensors on a GPU.
    """
    function = torch.jit.ScriptFunction
    with (
        mock.patch.object(function, "__call__", _call_as_written),
        mock.patch.object(function, "__deepcopy__", _itself, create=True),
        mock.patch.object(torch.ScriptMethod, "__call__", _call_on_host),
    ):
        yield


_call_scripted: Any = torch.jit.ScriptFunction.__call__
_call_method: Any = torch.ScriptMethod.__call__


def _call_as_written(program: Any, *args: Any, **kwargs: Any) -> Any:
    written = getattr(program, "_torchdynamo_inline", None)
    return _call_scripted(program, *args, **kwargs) if written is None else written(*args, **kwargs)


def _itself(program: Any, _: Any) -> Any:
    return program


def _call_on_host(method: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves):
        raise CaptureError(
            f"wanted code of Python, which can be traced, got {method.name!r} of a module of TorchScript, "
            "whose kernels on a GPU read tensors that have no memory yet; give the module that it was made of"
        )
    return _call_method(method, *args, **kwargs)
