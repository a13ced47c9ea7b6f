"""Sparse rows pushed by several workers: each brings its rows to who serves them, who says what changed."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, Updater
from ridgeline.runtime.kvstore.values.held_values import apply
from ridgeline.runtime.kvstore.values.placement import ValuePart
from ridgeline.tensors.row_sums import rows_tensor, summed_rows
from ridgeline.workers.flat_collectives import all_to_all_uneven


def push_rows(
    key: Key,
    total: Tensor,
    value: Tensor,
    parts: Sequence[ValuePart],
    updater: Updater | None,
    group: dist.ProcessGroup,
) -> None:
    """Work the sums of all workers into a value that each of them has a copy of.

    Args:
        key: Of the value.
        total: Coalesced, sparse in its first dimension alone.
        value: This worker's copy.
        parts: Of the value; at most one a worker.
        updater: Of the part that this worker serves.
        group: Of the workers, all of whom call this.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    bounds = {part.place: (part.start, part.stop) for part in parts}
    ranges = [bounds.get(place, (0, 0)) for place in range(size)]
    ids, rows = total.indices()[0], total.values()
    chosen = [(ids >= start) & (ids < stop) for start, stop in ranges]
    brought = _exchange_rows([(ids[one], rows[one]) for one in chosen], group)
    start, stop = ranges[rank]
    # By rank, so that sums have the same bits in every run.
    touched, summed = summed_rows(brought)
    failed: KVStoreError | None = None
    if stop > start:
        mine = value[start:stop]
        try:
            apply(updater, key, rows_tensor(touched - start, summed, mine.shape), mine)
        except KVStoreError as error:
            failed = error  # the others wait for the outcome, of this too
    if not _keeps_other_rows(updater, key):
        # Momenta and weight decay move rows without a gradient, too.
        touched = torch.arange(start, stop, device=ids.device)
    who = _tell_rows(touched, value, group, has_failed=failed is not None)
    if failed is not None:
        raise failed
    raise_where_failed(who, [key])


def raise_where_failed(workers: Sequence[int], keys: Sequence[Key]) -> None:
    """Report updates that failed on other workers.

    Args:
        workers: Where some did.
        keys: Of the push.

    Raises:
        KVStoreError: there is one.
    """
    if workers:
        raise KVStoreError(
            f"wanted the updates of keys {', '.join(map(repr, keys[:3]))} to work, got a failure on worker "
            f"{workers[0]}, which serves one of them; its own error says what"
        )


def _tell_rows(
    touched: Tensor, value: Tensor, group: dist.ProcessGroup, *, has_failed: bool
) -> list[int]:
    """Bring all copies up to date with the rows that this worker has touched; who says that it failed."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    flag = touched.new_tensor([int(has_failed)])
    flags = all_to_all_uneven([flag] * size, [1] * size, group)
    for place, (heard, changed) in enumerate(
        _exchange_rows([(touched, value[touched])] * size, group)
    ):
        if place != rank:
            value[heard] = changed
    return [place for place, one in enumerate(flags) if one.item()]


def _exchange_rows(
    sends: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup
) -> list[tuple[Tensor, Tensor]]:
    """Send numbers and rows to each worker, and return what each has sent."""
    rows = sends[0][1]
    counts = all_to_all_uneven(
        [one.new_tensor([len(one)]) for one, _ in sends], [1] * len(sends), group
    )
    lengths = [int(count) for count in counts]
    # Elements of a row, of which there may be none here and some that come.
    width = rows[:1].numel() if len(rows) else rows.new_empty(1, *rows.shape[1:]).numel()
    heard = all_to_all_uneven([one for one, _ in sends], lengths, group)
    flat = [one.reshape(-1) for _, one in sends]
    brought = all_to_all_uneven(flat, [length * width for length in lengths], group)
    return [
        (numbers, one.view(len(numbers), *rows.shape[1:]))
        for numbers, one in zip(heard, brought, strict=True)
    ]


def _keeps_other_rows(updater: Updater | None, key: Key) -> bool:
    """Whether rows without a gradient stay as they are. Source: torch/optim, releases 2.11 to 2.13."""
    if not isinstance(updater, OptimizerUpdater):
        return False
    name = updater.wanted.name
    is_plain_sgd = name == "sgd" and not updater.wanted.of(key).get("momentum")
    return is_plain_sgd or name in ("sparseadam", "adagrad")
