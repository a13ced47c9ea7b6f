"""PowerSGD: the gradient of a matrix as two factors, by one step of a power iteration.

All workers make the mean of the left factors, orthonormalise it, and make the mean of the right factors. What
a worker keeps is its own gradient less the product of the common left and its *own* right factor. Less the
product with the mean, as torch's hook has it, it would keep how it differs from the others, which grows with
the square root of the number of steps, or with that number where workers differ always alike. What of that
no column of a mean reaches is never sent, by either rule: it grows on each worker, and adds up to nothing.

Source: Vogels et al., "PowerSGD", NeurIPS 2019, and the authors' program (epfml/powersgd).
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Codec, Exchange
from ridgeline.runtime.sync.codecs.orthogonal import orthonormalised
from ridgeline.synchronisation import OptionValue, factor_rank

_PREFIX = "factor."


class _Alike(NamedTuple):
    """Parameters of a bucket that are matrices of one shape: where they stand, and their right factors."""

    positions: tuple[int, ...]
    shape: tuple[int, int]
    rights: Tensor  # [matrices, columns, rank]


class PowerSGD(Codec):
    """Rank `rank` of every gradient that two factors are smaller than; the others travel as they are.

    Products are made where the gradients lie, one by one: to gather them would move more than they do. Each
    step starts from the right factors of the last.
    """

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        super().__init__(options)
        self._alike: dict[int, tuple[_Alike, ...]] = {}
        self._plain: dict[int, tuple[int, ...]] = {}
        self._rights: dict[str, Tensor] = {}

    def share(self, values: Tensor, mean: Tensor, exchange: Exchange, bucket: Bucket) -> None:
        """Two means: left factors and what is not factored, then right factors."""
        groups, plain = self._alike[bucket.index], self._plain[bucket.index]
        dense = [bucket.place(position, values) for position in plain]
        matrices = [
            [_matrix(bucket.place(position, values)) for position in group.positions]
            for group in groups
        ]
        lefts = [
            torch.stack([m @ right for m, right in zip(mine, group.rights, strict=True)])
            for mine, group in zip(matrices, groups, strict=True)
        ]
        dense_means, left_means = _means([*dense, *lefts], exchange, len(dense))
        lefts = [orthonormalised(left) for left in left_means]
        own = [
            torch.stack([m.mT @ left for m, left in zip(mine, told, strict=True)])
            for mine, told in zip(matrices, lefts, strict=True)
        ]
        _, rights = _means(own, exchange, 0)
        for position, place, found in zip(plain, dense, dense_means, strict=True):
            bucket.place(position, mean).copy_(found)
            # Sent without loss: nothing is left for the next step.
            place.zero_()
        for group, left, mine, common in zip(groups, lefts, own, rights, strict=True):
            for number, position in enumerate(group.positions):
                # This worker's own factor, not the mean: so what all workers have left adds up to what the
                # mean lacks.
                product = left[number], mine[number].mT
                _change(bucket.place(position, values), lambda m, p=product: m.addmm_(*p, alpha=-1))
                product = left[number], common[number].mT
                _change(bucket.place(position, mean), lambda m, p=product: torch.mm(*p, out=m))
            # In place: `self._rights`, and what `state_dict` gave out, are views of this memory.
            group.rights.copy_(_fit_to_start(common, group.rights))

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Find the matrices of each bucket; keep the right factor of each, wherever it lies now."""
        known = dict(self._rights)
        self._rights.clear()
        for bucket in buckets:
            # By shape: columns are made orthonormal one after the other, for all matrices of a shape at once.
            by_shape: dict[tuple[int, int, int], list[int]] = {}
            plain = []
            for position, parameter in enumerate(bucket.parameters):
                rank = factor_rank(tuple(parameter.shape), int(self.options["rank"]))
                if rank:
                    rows = parameter.shape[0]
                    shape = (rows, parameter.numel() // rows, rank)
                    by_shape.setdefault(shape, []).append(position)
                else:
                    plain.append(position)
            self._plain[bucket.index] = tuple(plain)
            self._alike[bucket.index] = tuple(
                self._group(bucket, positions, shape, known)
                for shape, positions in by_shape.items()
            )

    def _group(
        self,
        bucket: Bucket,
        positions: Sequence[int],
        shape: tuple[int, int, int],
        known: Mapping[str, Tensor],
    ) -> _Alike:
        rows, columns, rank = shape
        rights = torch.empty((len(positions), columns, rank), device=bucket.payload.device)
        for number, position in enumerate(positions):
            name = bucket.names[position]
            rights[number].copy_(known[name] if name in known else _first(name, columns, rank))
            self._rights[name] = rights[number]
        return _Alike(tuple(positions), (rows, columns), rights)

    def state_dict(self) -> dict[str, Tensor]:
        """`factor.<parameter>` to its right factor, not copied."""
        return {f"{_PREFIX}{name}": right for name, right in self._rights.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Start from these; parameters that are missing, or were sent in another rank, start again."""
        for name, right in self._rights.items():
            saved = state.get(f"{_PREFIX}{name}")
            if saved is None or saved.shape != right.shape:
                saved = _first(name, *right.shape)
            right.copy_(saved)


def _first(name: str, columns: int, rank: int) -> Tensor:
    """Where the iteration for a parameter begins: random, and the same on all workers."""
    # Not `hash`, which Python salts anew in every process.
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    return torch.randn((columns, rank), generator=generator, device="cpu")


def _fit_to_start(new: Tensor, old: Tensor) -> Tensor:
    """The new factors, and the old column where the new one is zero or not finite: nothing follows those."""
    length = new.abs().sum(1, keepdim=True)
    return torch.where((length > 0) & length.isfinite(), new, old)


def _means(
    parts: Sequence[Tensor], exchange: Exchange, num_dense: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The means of some tensors over the workers, in one exchange: of the first ones, and of the others."""
    if not parts:
        return [], []
    # One message for all: matrices are many and their factors small, so each alone would be mostly latency.
    flat = torch.cat([part.flatten() for part in parts])
    exchange.mean(flat)
    pieces = flat.split([part.numel() for part in parts])
    found = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
    return found[:num_dense], found[num_dense:]


def _rows_first(place: Tensor) -> Tensor:
    """The gradient of a parameter with its first dimension first, and the others as they lie in memory."""
    inner = sorted(range(1, place.dim()), key=place.stride, reverse=True)
    return place.permute(0, *inner)


def _matrix(place: Tensor) -> Tensor:
    """As [rows, columns]: a view, or a copy where rows lie inside of columns."""
    return _rows_first(place).reshape(place.shape[0], -1)


def _change(place: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Change the matrix of a gradient in its place."""
    matrix, seen = _matrix(place), _rows_first(place)
    change(matrix)
    if seen.dim() > 2 and not seen.is_contiguous():  # the matrix is a copy
        seen.copy_(matrix.view(seen.shape))
