"""What an operator reads, writes, makes and aliases, read from its schema and its tensors."""
# ruff: noqa: SLF001 - operators whose names begin with an underscore, and their schemas

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from ridgeline.capture.operator_writes import written_names

aten = torch.ops.aten

READ_ONLY: dict[OpOverloadPacket, tuple[str, ...]] = {
    aten._fused_sgd_: ("grads",),
    aten._fused_adam_: ("grads",),
    aten._fused_adamw_: ("grads",),
    aten._fused_adagrad_: ("grads",),
}
"""Arguments that the schema declares written, but only are when a gradient scaler is passed on."""

OVERWRITING = frozenset({
    aten.copy_, aten.fill_, aten.zero_, aten.bernoulli_, aten.normal_, aten.uniform_, aten.random_,
    aten.exponential_, aten._foreach_copy_, aten._foreach_zero_,
})  # fmt: skip
"""In-place operators that write their first argument without reading it."""

SHAPE_ONLY = frozenset({
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
    aten.randint_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full,
})  # fmt: skip
"""Operators that look at the shape of their tensors only."""

ALLOCATING = frozenset({
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty,
    aten.new_empty_strided,
})  # fmt: skip
"""Operators whose output is memory that was not written yet."""


@dataclass(frozen=True)
class Operands:
    """The tensors of one call.

    Attributes:
        inputs: Tensor arguments, each object once, in argument order.
        read: Those whose content is read.
        written: Those whose content is written.
        made: Results with a storage of their own.
        results: All results, in order.
        is_view: Nothing is read or written: the results are other looks at the inputs.
    """

    inputs: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    is_view: bool


def operands(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Operands:
    """The tensors of one call of an operator, sorted by what happens to them."""
    packet = func.overloadpacket
    inputs = tuple({id(t): t for t in _tensors((*args, *kwargs.values()))}.values())
    results = tuple(_tensors((result,)))
    overwritten_names = _overwritten(func)
    written = written_arguments(func, args, kwargs)
    untouched: tuple[Tensor, ...] = ()
    if packet in SHAPE_ONLY:
        untouched = inputs
    elif overwritten_names:
        untouched = tuple(
            _tensors(argument(func, args, kwargs, name) for name in overwritten_names)
        )
    storages = {storage_address(tensor) for tensor in inputs}
    made = tuple(tensor for tensor in results if storage_address(tensor) not in storages)
    unread = {id(tensor) for tensor in untouched}
    return Operands(
        inputs=inputs,
        read=tuple(tensor for tensor in inputs if id(tensor) not in unread),
        written=written,
        made=made,
        results=results,
        # A constant that enters the step is not copied: real execution hands on the same storage.
        is_view=packet is aten.lift_fresh or (bool(results) and not made and not written),
    )


def written_arguments(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """The tensors that a call writes into."""
    names = written_names(func, lambda name: argument(func, args, kwargs, name))
    kept = READ_ONLY.get(func.overloadpacket, ())
    return tuple(_tensors(argument(func, args, kwargs, name) for name in names if name not in kept))


def argument(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value of a named argument of a call; its default where it was left out.

    Raises:
        KeyError: the operator has no such argument.
    """
    position, default = _signature(func)[name]
    if position < len(args):
        return args[position]
    return kwargs.get(name, default)


def storage_address(tensor: Tensor) -> int:
    """What two tensors on the same storage have in common; the object itself for sparse layouts."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return id(tensor)


@cache
def _signature(func: OpOverload) -> dict[str, tuple[int, Any]]:
    """Name of each argument to (position, default)."""
    return {
        entry.name: (position, entry.default_value if entry.has_default_value() else None)
        for position, entry in enumerate(func._schema.arguments)
    }


@cache
def _overwritten(func: OpOverload) -> tuple[str, ...]:
    # What is given as `out` is filled, whatever was in it.
    filled = tuple(entry.name for entry in func._schema.arguments if entry.is_out)
    is_overwriting = func.overloadpacket in OVERWRITING and not filled
    return (func._schema.arguments[0].name,) if is_overwriting else filled


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
