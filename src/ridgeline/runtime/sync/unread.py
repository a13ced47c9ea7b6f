"""Parameters whose update is due when they are read.

Code that computes with a parameter, copies it or looks into its memory does so through torch's functions and
methods, and these ask `__torch_function__` of a subclass first. So a parameter is of such a subclass for as
long as its update is due: the first that reads it, be it a layer of the next forward pass, an evaluation or a
script, has it updated before it reads. No reader finds an old value, whatever the model does.

What is computed inside of TorchScript bypasses this, so modules that were compiled by it are refused.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

# What torch hands to `__torch_function__` for an attribute is the getter, which does not know its name.
SHAPES = frozenset(
    getattr(Tensor, name).__get__  # type: ignore[attr-defined]
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "layout",
        "ndim",
        "is_cuda",
    )
)
"""What an update does not change, so that asking for it is no reading."""


class UnreadParameter(nn.Parameter):
    """A parameter that calls `bring_up_to_date` before it is used; made by `make_unread` alone."""

    bring_up_to_date: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Update what is read, and continue as with plain parameters."""
        kwargs = kwargs or {}
        if func in SHAPES:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
                return func(*args, **kwargs)
        _bring_up_to_date((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter, up to date."""
        # torch's own asks for the class of the copy before it reads the data, and that is still this one.
        _bring_up_to_date((self,))
        return copy.deepcopy(cast("nn.Parameter", self), memo)


if UnreadParameter not in _foreach_supported_types:
    # A parameter is still unread while it is updated, and is to have the kernels of a plain one. Torch enters
    # its own subclasses, such as `DTensor`, in the same way.
    _foreach_supported_types.append(UnreadParameter)


def make_unread(parameters: Iterable[nn.Parameter], update: Callable[[], None]) -> None:
    """Have `update` called before one of these is read; it calls `make_plain` of all first."""
    for parameter in parameters:
        # In this order, as other threads read: what is of the class has to know its update.
        parameter.bring_up_to_date = update  # type: ignore[attr-defined]
        parameter.__class__ = UnreadParameter


def make_plain(parameters: Iterable[nn.Parameter]) -> None:
    """Have these be what they were: reading them does nothing more."""
    for parameter in parameters:
        if type(parameter) is UnreadParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            del parameter.bring_up_to_date


def _bring_up_to_date(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) is UnreadParameter:
            # None where another thread has made it plain since the class was looked at.
            if (update := vars(value).get("bring_up_to_date")) is not None:
                update()
        elif isinstance(value, (list, tuple)):
            _bring_up_to_date(value)
        elif isinstance(value, Mapping):
            _bring_up_to_date(value.values())
