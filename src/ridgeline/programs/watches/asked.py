"""What a program asks torch and tensors for: each answer is a constant of the program, and is compared.

Torch's compiler compares the settings that it knows to choose operators. Code may ask for others, such as
`torch.is_autocast_cache_enabled()`, and branch on the answer. Of a tensor's hooks and of its place in a graph
of gradients the compiler (2.11 to 2.13) asks a copy without data, which has none, and it takes each method
for that of the class, though a tensor may hold another one under its name.
"""

import functools
import re
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import UNKNOWN, compare, resolved, value_of
from ridgeline.programs.watches.left_to_python import (
    is_marked,
    is_plain_value,
    leave_assertion,
    refuse,
)
from ridgeline.programs.watches.settings import Ask
from ridgeline.reach.owners import is_torchs

_NOTED = "_ridgeline_asked"
_ASKING = re.compile(r"_{0,2}(get|is|are|has|current)_|.*_(enabled|allowed|count)$")
"""Names of functions that tell how torch is set: others may set something themselves."""
_NO_SETTING = re.compile(
    r"compiling|tracing|scripting|exporting|grad_enabled|inference_mode|available|propert"
)
"""In names of what is another while a program is read, is compared by the compiler, or stays as it is."""
_PLAIN = (str, int, type(None), torch.device, torch.dtype)
_call: Any = TorchInGraphFunctionVariable.call_function

_COMPARED = frozenset((
    "device", "dtype", "grad", "is_cpu", "is_cuda", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested",
    "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout", "nbytes", "ndim",
    "requires_grad", "shape",
))  # fmt: skip
"""Attributes that follow from what the compiler compares of every tensor."""
_UNREADABLE = ("__dict__", "__weakref__")
_DESCRIPTORS = (types.GetSetDescriptorType, property)
_attribute_in_torch: Any = TensorVariable.var_getattr


def note_asked() -> None:
    """Have the compiler of this process note what a program asks torch and tensors for; again, too."""
    TensorVariable.var_getattr = _attribute  # type: ignore[method-assign]
    if TorchInGraphFunctionVariable.call_function is _call:  # and not patched for one reading
        TorchInGraphFunctionVariable.call_function = _answer  # type: ignore[method-assign]


def asked_of(output: Any) -> tuple[Ask, ...]:
    """Functions that ask for it again; of what the compiler makes of a program."""
    return tuple(vars(output).get(_NOTED, {}).values())


def _answer(variable: Any, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
    """In place of the method of `TorchInGraphFunctionVariable`."""
    leave_assertion(variable, tx, args, kwargs)
    result: VariableTracker = _call(variable, tx, args, kwargs)
    name = getattr(variable.value, "__name__", "")
    is_asking = not kwargs and _ASKING.match(name) and not _NO_SETTING.search(name)
    if is_asking and result.is_python_constant() and is_marked(tx.output.compiler_fn):
        given = [a.as_python_constant() if a.is_python_constant() else a for a in args]
        if all(isinstance(one, _PLAIN) for one in given):
            noted = vars(tx.output).setdefault(_NOTED, {})
            noted[variable.value, *given] = partial(variable.value, *given)
    return result


@functools.cache
def is_missing(name: str) -> Callable[[Any, Guard], None]:
    """A guard: an object holds nothing under a name itself."""
    return functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)


def _attribute(variable: Any, tx: Any, name: str) -> Any:
    """In place of the method of `TensorVariable`."""
    if name in _UNREADABLE and is_marked(tx.output.compiler_fn):
        _refuse(name, "The compiler cannot read it.")
    result = _attribute_in_torch(variable, tx, name)
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
