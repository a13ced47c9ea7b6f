"""What TorchDynamo refuses or leaves open where it compiles, and may take as it is where it only reads."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import ConstantVariable, TensorVariable, builder, builtin
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch.autograd import Variable

from ridgeline.guards.numbers import numbers_known

_REFUSING = ("wrap_tensor", "handle_traced_output")
"""Functions of TorchDynamo that refuse a sparse tensor since what is compiled has no guards for its elements.
Where others ask, it is about strides, which a sparse tensor has not."""
_LEAVES = "_check_requires_grad_intermediate_outputs"
"""TorchDynamo (2.13) refuses a result that depends on a tensor which the program itself made require
gradients (of a penalty, or of an equation for a network to fulfil): a compiled program would lose them."""
_Setting: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
"""What sets attributes: a class of its own since torch 2.13."""
_ANY_DRAW = 0.5
_is_sparse_any = builder.is_sparse_any
_sizes_of = builder._automatic_dynamic  # noqa: SLF001 - no setting leaves marks out
_as_in_torch: Any = TensorVariable.method_requires_grad_


@contextlib.contextmanager
def read_leniently() -> Iterator[None]:
    """Inside, TorchDynamo takes sparse tensors, new leaves, and sizes marked as dynamic, as what they are.

    Sparse tensors by shape, dtype and layout. A program may make tensors require gradients, by the method or
    by setting the attribute, and return what depends on them. Numbers that NumPy makes of constants are
    constants. Each size is fixed, since a captured program serves one only, even where a user marked it
    (`torch._dynamo.mark_dynamic`), or a compiled program what it returns. Numbers and texts that the class of
    an `autograd.Function` holds are compared, as those of other classes.
    """
    # By what a version has and not by its number, so that a release between the two is met as well.
    if hasattr(OutputGraph, _LEAVES):
        leaves = mock.patch.object(OutputGraph, _LEAVES, return_value=None)
    else:
        leaves = mock.patch.object(TensorVariable, "method_requires_grad_", _requires_grad_)
    with (
        leaves,
        numbers_known(),
        _around(TorchInGraphFunctionVariable, _creating),
        _around(UserDefinedClassVariable, _variable),
        _around(_Setting, _setattr),
        mock.patch.object(builder, "is_sparse_any", _is_refused),
        mock.patch.object(builder, "_automatic_dynamic", _static_sizes),
        mock.patch.object(AutogradFunctionVariable, "const_getattr", _held_by_class),
    ):
        yield


@contextlib.contextmanager
def host_draws_read() -> Iterator[None]:
    """Inside, TorchDynamo takes `torch.rand([])` for a number, so that it can read what compares one.

    For programs whose draws on the host are known to decide nothing, see `idle_draws`. Another use of the
    number than a comparison ends the reading.
    """
    with _around(TorchInGraphFunctionVariable, _draw):
        yield


def _draw(before: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`torch.rand([])` as a number."""
    # Only the form in which libraries draw a number on the host: others may draw tensors that are used.
    is_draw = function.value is torch.rand and not kwargs and len(args) == 1
    if is_draw and _is_single(args[0]) and torch.get_default_device().type == "cpu":
        return ConstantVariable.create(_ANY_DRAW)
    return before(function, tx, args, kwargs)


def _is_single(size: Any) -> bool:
    return bool(size.is_python_constant()) and size.as_python_constant() in ([], (), [1], (1,), 1)


def _is_refused(value: Any) -> bool:
    asking = sys._getframe(1).f_code.co_name  # noqa: SLF001 - the documented way
    return asking not in _REFUSING and bool(_is_sparse_any(value))


def _static_sizes(e: Any, tx: Any, source: Any, _: bool, *args: Any, **kwargs: Any) -> Any:
    return _sizes_of(e, tx, source, True, *args, **kwargs)


def _held_by_class(function: Any, _: Any, name: str) -> Any:
    """What TorchDynamo asks for an attribute; numbers and texts become constants with a guard."""
    return inspect.getattr_static(function.fn_cls, name, function)  # which is no constant


def _around(kind: Any, call: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Inside, calls of this kind go to `call`, which is given what they went to before."""
    # As it is now and not as torch has it: what a program leaves to Python is told there.
    before: Any = kind.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return call(before, self, tx, args, kwargs)

    return mock.patch.object(kind, "call_function", call_function)


def _creating(before: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`torch.zeros(n, requires_grad=True)` as two calls."""
    wanted = kwargs.get("requires_grad")
    if wanted is None or not wanted.is_python_constant() or not wanted.as_python_constant():
        return before(function, tx, args, kwargs)
    plain = {name: value for name, value in kwargs.items() if name != "requires_grad"}
    made = before(function, tx, args, plain)
    return made.call_method(tx, "requires_grad_", [wanted], {})


def _variable(before: Any, kind: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`Variable(x, requires_grad=...)`, of use before torch 0.4, as the view of `x` that it makes."""
    if kind.value is not Variable or not isinstance(args[0], TensorVariable):
        return before(kind, tx, args, kwargs)
    view = TorchInGraphFunctionVariable(torch.ops.aten.alias.default)
    made = view.call_function(tx, [args[0]], {})
    wanted = [*args[1:], *kwargs.values()]
    return made.call_method(tx, "requires_grad_", wanted, {}) if wanted else made


def _setattr(before: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`x.requires_grad = ...` as `x.requires_grad_(...)`, which does the same."""
    if getattr(function, "fn", setattr) is setattr and isinstance(args[0], TensorVariable):
        name, value = args[1:]
        if name.as_python_constant() == "requires_grad":
            return args[0].call_method(tx, "requires_grad_", [value], {})
    return before(function, tx, args, kwargs)


def _requires_grad_(variable: Any, tx: Any, requires_grad: Any = True) -> Any:
    """What torch 2.11 lacks: a tensor that the program has made changes as it does when the program runs."""
    wanted = requires_grad if requires_grad is True else requires_grad.as_python_constant()
    example = variable.as_proxy().node.meta["example_value"]
    if variable.source is not None or example.requires_grad == wanted:
        return _as_in_torch(variable, tx, requires_grad)
    example.requires_grad_(wanted)
    variable.requires_grad = wanted
    return variable
