"""Keys and values as a caller gives them, one or several, made lists and checked before anything is done."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import KVStoreError

Key = int | str
_SUMMED = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""The types that torch adds up, on any device; it has others that it only keeps."""


class Held(NamedTuple):
    """What a store knows of a key: every value of it has this shape and type."""

    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}".removeprefix("torch.")


def listed(key: Any, action: str) -> list[Key]:
    """The keys of a call.

    Raises:
        KVStoreError: no key, no integer or text, texts among integers, or one twice.
    """
    # A text is a sequence, too, of one-letter keys that nobody meant.
    keys = [*key] if isinstance(key, Sequence) and not isinstance(key, str) else [key]
    kinds = {type(one) for one in keys}
    if not keys or not kinds <= {int, str} or len(kinds) > 1:
        got = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
        raise KVStoreError(f"wanted keys that are all int or all str for {action}, got {got}")
    if len({*keys}) < len(keys):
        twice = next(one for one in keys if keys.count(one) > 1)
        raise KVStoreError(
            f"wanted each key once for {action}, got {twice!r} twice; give the values of several devices as "
            "a list for the one key"
        )
    return keys


def values_of(key: Any, value: Any, action: str) -> dict[Key, list[Tensor]]:
    """The tensors of each key: one, or one for each device.

    Raises:
        KVStoreError: keys as `listed` refuses them, another number of values than of keys, or no tensor.
    """
    keys = listed(key, action)
    is_single = isinstance(key, int | str)
    values = [value] if is_single else value
    if not isinstance(values, Sequence) or len(values) != len(keys):
        got = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise KVStoreError(
            f"wanted a value for each of {len(keys)} keys for {action}, got {got}; a list holds one entry a "
            "key, which is a tensor or a list of tensors"
        )
    found = {
        one: [entry] if isinstance(entry, Tensor) else [*entry] if _is_list(entry) else []
        for one, entry in zip(keys, values, strict=True)
    }
    for one, tensors in found.items():
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise KVStoreError(f"wanted a tensor, or a list of them, for key {one!r} in {action}")
        if any(tensor.is_meta for tensor in tensors):
            raise KVStoreError(
                f"wanted a tensor with elements for key {one!r} in {action}, got one of the device 'meta'; "
                "give it memory first (torch.empty_like(tensor, device='cpu'))"
            )
    # Detached, since a store outlives the step whose graph they may hang on.
    return {one: [tensor.detach() for tensor in tensors] for one, tensors in found.items()}


def _is_list(entry: Any) -> bool:
    return isinstance(entry, Sequence) and not isinstance(entry, str)


def check_first(key: Key, value: Tensor) -> None:
    """Refuse a first value that is sparse, or of a type without sums.

    Raises:
        KVStoreError: names the key, and what came.
    """
    if value.layout is not torch.strided:
        raise KVStoreError(
            f"wanted a dense value for key {key!r} in init, got {value.layout}; use to_dense()"
        )
    name = str(value.dtype).removeprefix("torch.")
    if name not in _SUMMED:
        raise KVStoreError(
            f"wanted a type that is added up for key {key!r} in init ({', '.join(_SUMMED)}), got {name}; use "
            "one of those"
        )


def check_fits(key: Key, tensors: Sequence[Tensor], held: Held, action: str) -> None:
    """Refuse values of another shape or type than the key was initialised with.

    Raises:
        KVStoreError: names the key, what it holds, and what came.
    """
    for tensor in tensors:
        got = Held(tensor.shape, tensor.dtype)
        if got != held:
            raise KVStoreError(
                f"wanted {held} for key {key!r} in {action}, as it was initialised, got {got}"
            )
        if tensor.is_sparse and tensor.sparse_dim() == 1:
            # These were not checked: torch builds such tensors without a look at the numbers.
            check_rows(key, tensor._indices(), held)  # noqa: SLF001 - indices() wants them coalesced
        elif tensor.layout is not torch.strided:
            raise KVStoreError(
                f"wanted a dense tensor or sparse rows for key {key!r} in {action}, got {_layout(tensor)}; "
                "use to_dense() or to_sparse(1)"
            )


def _layout(tensor: Tensor) -> str:
    dims = f" with {tensor.sparse_dim()} sparse dimensions" if tensor.is_sparse else ""
    return f"{tensor.layout}{dims}"


def places_for(held: Mapping[Key, Held]) -> dict[Key, list[Tensor]]:
    """New tensors on the CPU for a value of each key."""
    return {k: [torch.empty(one.shape, dtype=one.dtype, device="cpu")] for k, one in held.items()}


def rows_of(key: Any, row_ids: Any, held: Mapping[Key, Held]) -> dict[Key, Tensor]:
    """The numbers of rows of each key, as `row_sparse_pull` is given them.

    Raises:
        KVStoreError: another number of them than of keys, or as `check_rows`.
    """
    keys = listed(key, "row_sparse_pull")
    rows = [row_ids] if isinstance(key, int | str) else row_ids
    if not isinstance(rows, Sequence) or len(rows) != len(keys):
        raise KVStoreError(f"wanted row_ids for each of {len(keys)} keys in row_sparse_pull")
    return {k: check_rows(k, one, held[k]) for k, one in zip(keys, rows, strict=True)}


def check_rows(key: Key, rows: Any, held: Held) -> Tensor:
    """Numbers of rows as a flat int64 tensor on the CPU.

    Raises:
        KVStoreError: no integers, or a number that is no row of the key.
    """
    if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise KVStoreError(f"wanted row_ids as an int64 tensor for key {key!r}, got {got}")
    flat = rows.detach().to("cpu", torch.int64).reshape(-1)
    num_rows = held.shape[0] if held.shape else 0
    # Negative numbers as well: indexing would take them for rows from the end.
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_rows:
        raise KVStoreError(
            f"wanted row_ids of key {key!r} from 0 to {num_rows - 1}, got {int(flat.min())} to "
            f"{int(flat.max())}"
        )
    return flat
