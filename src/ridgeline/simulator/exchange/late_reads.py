"""Held buckets in the next forward pass: which operator waits for each, and what its late update costs.

A parameter of a held bucket is updated by its first reader (see `synchronisation.holding`). The trace says
which operator that is: the first operator of the forward pass with a parameter of that shape among its
inputs, in the module that owns the parameter; where none is in that module, the first one anywhere.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.plan import Sync, cut_buckets
from ridgeline.simulator.pricing.pieces import ADDITIVE, Piece, bucket_gradients
from ridgeline.synchronisation import frame_names, num_held
from ridgeline.workload import Op, Parameter, Workload

LATE_UPDATE = "late_update"
"""The name of the piece that updates the parameters of a held bucket."""


class LateRead(NamedTuple):
    """Where a forward pass waits for a held bucket of the step before.

    Attributes:
        frame: The name of the bucket's exchange.
        at: How many pieces of the forward pass come before.
        update: What the optimizer does to the bucket's parameters then.
    """

    frame: str
    at: int
    update: Piece


def late_reads(
    workload: Workload, sync: Sync, forward: Sequence[Piece], optimizer: Sequence[Piece]
) -> tuple[LateRead, ...]:
    """The held buckets of a plan in the order in which a forward pass comes to them; none where none is held.

    `forward` has one piece an operator, in order; `optimizer` is the update of all parameters, of which
    a bucket has the part that its bytes are of all.
    """
    gradients = bucket_gradients(workload, sync)
    buckets = cut_buckets([(p.num_bytes, p.dtype) for p in gradients], sync.bucket_bytes)
    held = num_held(sync, len(buckets))
    if not held or not optimizer:
        return ()
    total = sum(p.num_bytes for p in gradients)
    names = frame_names(sync, len(buckets))
    # One piece an operator and in order: held steps are eager, so nothing is fused.
    ops = [piece.op for piece in forward]
    readers = _readers(workload)
    found = []
    for number in reversed(range(len(buckets) - held, len(buckets))):
        members = [gradients[index] for index in buckets[number]]
        # A bucket is waited for as a whole, by whoever needs any of its parameters first.
        first = min(_first_reader(p, readers, len(workload.ops)) for p in members)
        share = sum(p.num_bytes for p in members) / total if total else 0.0
        update = _update(optimizer, share, f"bucket/{number}")
        # Before the reader, whose parameter it updates.
        found.append(LateRead(names[number], bisect_left(ops, first), update))
    # What leaves first, the last bucket, stays first where one operator reads several.
    return tuple(sorted(found, key=lambda read: read.at))


def early_update(optimizer: Sequence[Piece], reads: Sequence[LateRead]) -> tuple[Piece, ...]:
    """What is left of the update at the end of a step, whose other part is done late."""
    whole_s = sum(piece.lane_s for piece in optimizer)
    late_s = sum(read.update.lane_s for read in reads)
    # As a share of seconds, since whatever is not done late is done early.
    left = max(0.0, 1.0 - late_s / whole_s) if whole_s else 1.0
    return tuple(_share(piece, left) for piece in optimizer) if reads else tuple(optimizer)


_Readers = Mapping[tuple[int, ...], Sequence[tuple[int, str]]]


def _readers(workload: Workload) -> _Readers:
    """Operators of the forward pass that read a parameter, with their modules, by the parameter's shape."""
    found: dict[tuple[int, ...], list[tuple[int, str]]] = {}
    for index, op in enumerate(workload.ops):
        for shape in _parameter_shapes(op):
            found.setdefault(shape, []).append((index, op.module))
    return found


def _parameter_shapes(op: Op) -> set[tuple[int, ...]]:
    if op.phase != "forward":
        return set()
    return {spec.shape for spec in op.inputs if spec.role == "parameter"}


def _first_reader(parameter: Parameter, readers: _Readers, never: int) -> int:
    """The operator that reads a parameter first; `never`, behind all, where none does."""
    alike = readers.get(parameter.shape, ())
    owner = parameter.name.rpartition(".")[0]
    # By module first: parameters of one shape are common, as in equal layers.
    own = [index for index, module in alike if module == owner]
    return min(own or [index for index, _ in alike], default=never)


def _update(optimizer: Sequence[Piece], share: float, module: str) -> Piece:
    """The optimizer's step on a share of all bytes, as one piece."""
    parts = [_share(piece, share) for piece in optimizer]
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in ADDITIVE}
    return parts[0]._replace(name=LATE_UPDATE, module=module, op=-1, members=(), **sums)


def _share(piece: Piece, share: float) -> Piece:
    """A piece of which a share is done: what updates each parameter by itself is called less often, too."""
    scaled = {name: getattr(piece, name) * share for name in ADDITIVE}
    counts = {name: round(scaled[name]) for name in ("flops", "num_bytes")}
    return piece._replace(**scaled | counts)
