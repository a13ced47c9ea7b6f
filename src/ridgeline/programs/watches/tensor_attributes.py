"""What code asks a tensor for besides its elements: methods, hooks, its place in a graph of gradients.

Torch's compiler (2.11 to 2.13) answers from a copy without data, which has no hooks and is in no graph, and
takes each method for that of the class, though an object may hold another one under its name.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import UNKNOWN, compare, resolved, value_of
from ridgeline.programs.watches.left_to_python import is_marked, is_plain_value, refuse
from ridgeline.reach.owners import is_torchs

_COMPARED = frozenset((
    "device", "dtype", "grad", "is_cpu", "is_cuda", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested",
    "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout", "nbytes", "ndim",
    "requires_grad", "shape",
))  # fmt: skip
"""Attributes that follow from what the compiler compares of every tensor."""
_UNREADABLE = ("__dict__", "__weakref__")
_DESCRIPTORS = (types.GetSetDescriptorType, property)
_in_torch: Any = TensorVariable.var_getattr


def follow_tensor_attributes() -> None:
    """Have the compiler of this process compare what programs ask tensors for; again, too."""
    TensorVariable.var_getattr = _attribute  # type: ignore[method-assign]


@functools.cache
def is_missing(name: str) -> Callable[[Any, Guard], None]:
    """A guard: an object holds nothing under a name itself."""
    return functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)


def _attribute(variable: Any, tx: Any, name: str) -> Any:
    """In place of the method of `TensorVariable`."""
    if name in _UNREADABLE and is_marked(tx.output.compiler_fn):
        _refuse(name, "The compiler cannot read it.")
    result = _in_torch(variable, tx, name)
    source, of_class = variable.source, getattr(torch.Tensor, name, None)
    if source is None or of_class is None or not is_marked(tx.output.compiler_fn):
        return result
    if type.__instancecheck__(GetAttrVariable, result):
        if source.subguards_allowed():
            tx.output.guards.add(source.make_guard(is_missing(name)))
        return result
    is_asked = isinstance(of_class, _DESCRIPTORS) and name not in _COMPARED
    # Code of torch asks where it makes no difference.
    if is_asked and not (result.is_tensor() or is_torchs(tx.f_code.co_filename)):
        _require_attribute(tx.output, source, name, result)
    return result


def _require_attribute(output: Any, source: Any, name: str, result: Any) -> None:
    """Compare what a tensor says of itself, or refuse to where the compiler knows another answer."""
    tensor = resolved(output, source)
    if tensor is UNKNOWN:
        return
    if result.is_python_constant() and result.as_python_constant() != getattr(tensor, name):
        _refuse(name, "The compiler asks a copy of the tensor, whose answer is another.")
    output.guards.add(Guard(source, _required(name)))


def _refuse(name: str, why: str) -> NoReturn:
    refuse(
        name,
        f"{name} of a tensor, where a captured program does not look; ask for it outside, and hold the "
        "answer in an attribute",
        why,
    )


@functools.cache
def _required(name: str) -> Callable[[Any, Guard], None]:
    return functools.partial(_require, name)


def _require(name: str, builder: Any, guard: Guard) -> None:
    """A `Guard` on an attribute of a tensor."""

    def look(tensor: Any) -> Any:
        part = getattr(tensor, name)
        return part if is_plain_value(part) else (type(part), bool(part))

    value = value_of(builder, guard)
    if value is not UNKNOWN:
        compare(builder.get_guard_manager(guard), look, value, f"{name} of {guard.name}")
