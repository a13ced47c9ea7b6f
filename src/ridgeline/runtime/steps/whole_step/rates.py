"""Learning rates as inputs of a step program."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ridgeline.errors import CaptureError


class LearningRateInputs:
    """One learning-rate tensor for each group, holding what the optimizer's groups say.

    They lie beside what the groups have: a float is written when it changes, a tensor is copied before each
    step. The optimizer itself is left alone, so it also steps eagerly. On the CPU a float's tensor has 64
    bits, as Python's numbers have.

    Raises:
        CaptureError: a group has no learning rate (an optimizer around others, whose groups have them).
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._known: list[float | None] = []
        self.tensors: list[Tensor] = []
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        for index, group in enumerate(optimizer.param_groups):
            if group.get("lr") is None:
                name = type(optimizer).__name__
                got = f"{name} with lr=None" if "lr" in group else f"{name} without"
                raise CaptureError(
                    "wanted a learning rate 'lr' in each parameter group, which one program for the whole "
                    f"step takes as an input, got group {index} of {got}; put "
                    "it there, or use execution='compiled' or 'eager'"
                )
            rate = group["lr"]
            # Never the group's own tensor: one that is given to an optimizer stands in all of its groups, and
            # the rate that one group gets later would be written into that of the others, or of the script.
            if isinstance(rate, Tensor):
                self.tensors.append(rate.detach().to(device, copy=True))
                self._known.append(None)
            else:
                self.tensors.append(torch.tensor(float(rate), dtype=dtype, device=device))
                self._known.append(float(rate))

    def refresh(self) -> None:
        """Write learning rates that changed.

        Cost: A comparison for each group; where one changed, a fill on the device. A learning rate that is
        a tensor is copied each time, which may wait where it lies on another device than the model.
        """
        groups = self._optimizer.param_groups
        for index, (group, tensor) in enumerate(zip(groups, self.tensors, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                # Not only where it is another one: schedulers write into the tensor that is there.
                tensor.copy_(rate.detach())
                self._known[index] = None
            elif rate != self._known[index]:
                tensor.fill_(rate)
                self._known[index] = rate


class ScaledByTensors(TorchFunctionMode):
    """Inside, what operators take as a number may be a tensor of one element, as a learning rate in a trace.

    Written for numbers, an optimizer passes them as `alpha=-lr` or `value=-lr`, where torch would read the
    tensor on the host. Here the product is an operator of its own, which a compiler joins with the rest.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        makes_product = _PRODUCTS.get(name.removeprefix(_OF_LISTS).rstrip("_"))
        key = "value" if "addc" in name else "alpha"
        if makes_product is None or not isinstance(given.get(key), Tensor):
            return func(*args, **given)
        term, scale = makes_product(args, given), given.pop(key)
        if "addc" in name:
            func = _SUMS[name.startswith(_OF_LISTS), name.endswith("_")]
        if name.startswith(_OF_LISTS):
            return func(args[0], [_scaled(one, scale) for one in term], **given)
        return func(args[0], _scaled(term, scale), **given)


def _scaled(term: Any, scale: Tensor) -> Tensor:
    product: Tensor = term * scale
    if isinstance(term, Tensor) and term.is_floating_point():
        product = product.to(term.dtype)  # of two single elements the wider one would decide
    return product


_OF_LISTS = "_foreach_"
"""Begins the names of operators on lists of tensors."""
_SUMS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): torch.add,
    (False, True): Tensor.add_,
    (True, False): torch._foreach_add,  # noqa: SLF001 - optimizers call it by this name
    (True, True): torch._foreach_add_,
}
"""What adds a product that has been made: of lists or not, in place or not."""


def _operand(args: Sequence[Any], given: dict[str, Any]) -> Any:
    operand = args[1] if len(args) > 1 else given.pop("other")
    return _by_element(_widened, operand, args[0])


def _factors(args: Sequence[Any], given: dict[str, Any]) -> list[Any]:
    factors = [*args[1:], *(given.pop(key) for key in ("tensor1", "tensor2") if key in given)]
    return [_by_element(_widened, factor, args[0]) for factor in factors]


def _widened(term: Any, into: Any) -> Any:
    """A term in the type in which it is added: the operator rounds no product to the term's own, say bf16."""
    if isinstance(term, Tensor) and isinstance(into, Tensor):
        return term.to(torch.promote_types(term.dtype, into.dtype))
    return term


def _product(args: Sequence[Any], given: dict[str, Any]) -> Any:
    return _by_element(operator.mul, *_factors(args, given))


def _quotient(args: Sequence[Any], given: dict[str, Any]) -> Any:
    return _by_element(operator.truediv, *_factors(args, given))


def _by_element(function: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    if not isinstance(first, Sequence):
        return function(first, second)
    return [function(one, other) for one, other in zip(first, second, strict=True)]


_PRODUCTS = {"add": _operand, "sub": _operand, "addcmul": _product, "addcdiv": _quotient}
"""Operators that add a term times a number, and that term."""
