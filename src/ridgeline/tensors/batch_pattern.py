"""Recognising batches like an earlier one, in a microsecond.

A compiled step takes flat tensors of fixed shapes. Flattening a batch and describing it in full costs as much
as a small compiled step; comparing it with what is expected, leaf by leaf, does not.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.tensors.constants import TensorHolder, constant

Match = Callable[[Any, list[Tensor]], bool]
"""Whether a part of a batch is as expected; its tensors are appended to the list."""


class BatchPattern:
    """The structure, shapes, dtypes and device of a batch: `pattern.tensors(batch)`.

    Args:
        example: Any nest of tuples, lists and dicts of tensors and constants.
    """

    def __init__(self, example: Any) -> None:
        self._match = _pattern(example)

    def tensors(self, batch: Any) -> list[Tensor] | None:
        """The tensors of a batch like the example, in the order of `pytree`; None for any other."""
        found: list[Tensor] = []
        return found if self._match(batch, found) else None


def _pattern(example: Any) -> Match:
    kind = type(example)
    if isinstance(example, Tensor):
        return _tensor_pattern(example)
    if kind is dict:
        return _dict_pattern(example)
    if kind is tuple or kind is list:
        parts = [_pattern(part) for part in example]

        def match_sequence(batch: Any, found: list[Tensor]) -> bool:
            if type(batch) is not kind or len(batch) != len(parts):
                return False
            return all(part(value, found) for part, value in zip(parts, batch, strict=True))

        return match_sequence
    leaves, structure = pytree.tree_flatten(example)
    if len(leaves) == 1 and leaves[0] is example:
        expected = constant(example)
        if isinstance(expected, TensorHolder):
            return lambda batch, _: expected.is_of(batch)
        # By text, as `signature` does it: `==` may be elementwise, and NaN differs from itself.
        return lambda batch, _: type(batch) is kind and constant(batch) == expected
    inner = [
        _pattern(leaf) for leaf in leaves
    ]  # a named tuple, or a container registered with pytree

    def match_registered(batch: Any, found: list[Tensor]) -> bool:
        flat, other = pytree.tree_flatten(batch)
        return other == structure and all(
            part(leaf, found) for part, leaf in zip(inner, flat, strict=True)
        )

    return match_registered


def _tensor_pattern(example: Tensor) -> Match:
    shape, dtype, device = example.shape, example.dtype, example.device

    def match_tensor(batch: Any, found: list[Tensor]) -> bool:
        if (
            not isinstance(batch, Tensor)
            or batch.shape != shape
            or batch.dtype != dtype
            or batch.device != device
        ):
            return False
        found.append(batch)
        return True

    return match_tensor


def _dict_pattern(example: dict[Any, Any]) -> Match:
    """Keys stand in the order of the example: code may go through them."""
    keys, parts = [*example], [*map(_pattern, example.values())]

    def match_dict(batch: Any, found: list[Tensor]) -> bool:
        if type(batch) is not dict or [*batch] != keys:
            return False
        return all(part(value, found) for part, value in zip(parts, batch.values(), strict=True))

    return match_dict
