"""Least bytes that an operator moves: each distinct input read once, each result written once.

Exceptions are listed in `_SPECIAL`: operators that touch only a part of a tensor (gathering), or
must go over it twice (batch statistics before normalising).
"""
# ruff: noqa: SLF001 - operators whose names begin with an underscore

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from ridgeline.tracing.operators.operands import ALLOCATING, Operands, argument, storage_address

aten = torch.ops.aten
Get = Callable[[str], Any]


def traffic(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Operands
) -> tuple[int, int]:
    """Least (bytes read, bytes written) of one call of an operator; (0, 0) for views."""
    packet = func.overloadpacket
    if tensors.is_view or packet in ALLOCATING:
        return 0, 0
    special = _SPECIAL.get(packet)
    if special is not None:
        return special(lambda name: argument(func, args, kwargs, name), tensors)
    return _sum(tensors.read), _sum((*tensors.made, *tensors.written))


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor: a dimension of stride 0 counts once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = (
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0
    )
    return prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _sum(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors; two looks at the same elements count once."""
    # By what they show and not by object: `x * x.detach()` reads the elements once.
    distinct = {_elements(tensor): tensor for tensor in tensors}
    return sum(tensor_bytes(tensor) for tensor in distinct.values())


def _elements(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (storage_address(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _gather(table: str) -> Callable[[Get, Operands], tuple[int, int]]:
    """Reads what it returns, not the table; an index twice reads a row twice, at most the table."""

    def cost(get: Get, tensors: Operands) -> tuple[int, int]:
        source = get(table)
        rest = _sum(tensor for tensor in tensors.read if tensor is not source)
        made = _sum(tensors.made)
        return min(made, tensor_bytes(source)) + rest, made

    return cost


def _scatter(values: str) -> Callable[[Get, Operands], tuple[int, int]]:
    """Reads values and indices, and reads and writes only the touched elements of the target."""

    def cost(get: Get, tensors: Operands) -> tuple[int, int]:
        target, source = get("self"), get(values)
        touched = tensor_bytes(source) if isinstance(source, Tensor) else 0
        rest = _sum(tensor for tensor in tensors.read if tensor is not target)
        copied = _sum(tensors.made)  # not in place: the whole target is copied first
        return (copied or touched) + rest, copied + touched

    return cost


def _batch_norm(get: Get, tensors: Operands) -> tuple[int, int]:
    """In training the input is read twice: the mean must be known before the first result."""
    read = _sum(tensors.read)
    if _is_training(get):
        read += tensor_bytes(get("input"))
    return read, _sum((*tensors.made, *tensors.written))


def _batch_norm_backward(gradient: str) -> Callable[[Get, Operands], tuple[int, int]]:
    """In training input and gradient are read twice: their sums come before the first result."""

    def cost(get: Get, tensors: Operands) -> tuple[int, int]:
        read = _sum(tensors.read)
        if _is_training(get):
            read += tensor_bytes(get("input")) + tensor_bytes(get(gradient))
        return read, _sum(tensors.made)

    return cost


def _is_training(get: Get) -> bool:
    # The same flag by three names, depending on the library.
    for name in ("training", "train", "update"):
        try:
            return bool(get(name))
        except KeyError:
            continue
    return True  # the variants without such an argument exist for training only


def _one_element(get: Get, tensors: Operands) -> tuple[int, int]:
    return sum(tensor.element_size() for tensor in tensors.read), 0


_SPECIAL: dict[OpOverloadPacket, Callable[[Get, Operands], tuple[int, int]]] = {
    aten.embedding: _gather("weight"),
    aten.index_select: _gather("self"),
    aten.index: _gather("self"),
    aten.gather: _gather("self"),
    aten.take: _gather("self"),
    aten.index_put: _scatter("values"),
    aten.index_put_: _scatter("values"),
    aten._index_put_impl_: _scatter("values"),
    aten.index_add: _scatter("source"),
    aten.index_add_: _scatter("source"),
    aten.index_copy_: _scatter("source"),
    aten.scatter_add: _scatter("src"),
    aten.scatter_add_: _scatter("src"),
    aten.native_batch_norm: _batch_norm,
    aten._native_batch_norm_legit: _batch_norm,
    aten._batch_norm_with_update: _batch_norm,
    aten.cudnn_batch_norm: _batch_norm,
    aten.miopen_batch_norm: _batch_norm,
    aten.native_batch_norm_backward: _batch_norm_backward("grad_out"),
    aten.batch_norm_backward: _batch_norm_backward("grad_out"),
    aten.cudnn_batch_norm_backward: _batch_norm_backward("grad_output"),
    aten.miopen_batch_norm_backward: _batch_norm_backward("grad_output"),
    aten._local_scalar_dense: _one_element,
}
