"""All-gather, reduce-scatter and all-to-all of flat tensors, each share as large as the others, or not.

Over gloo the first and the last are messages between workers whose receives come first, so that a link
carries both ways at once. Source: two hosts, 100 Mbit/s, shares of 4 MiB: gloo's own all-to-all (torch 2.13)
takes 2.09 times what the link needs, its all-gather 1.46 times; messages 1.13 and 1.11 times.

Else they are the backend's own, whatever the installed torch calls them: torch 2.13 renames
`all_gather_into_tensor` and `reduce_scatter_tensor`, and warns of the old names.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_TAG = 0
"""Of all messages: the order distinguishes them."""


def all_gather(whole: Tensor, share: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `whole` with the share of each worker, by rank; None is the group of the whole job.

    `share` may be its place in `whole`, which has as many shares as there are workers.
    """
    if share.device.type != "cpu":
        _gather(whole, share, group=group)
        return
    shares = whole.view(dist.get_world_size(group), -1)
    shares[dist.get_rank(group)].copy_(share.view(-1))
    _exchange(shares, share.view(1, -1).expand_as(shares), group)


def all_gather_uneven(
    shares: Sequence[Tensor], own: Tensor, group: dist.ProcessGroup | None
) -> None:
    """Fill `shares` with the flat tensor of each worker, by rank, which may be of different lengths.

    `shares` are as long as what each worker has; all know these lengths.

    Cost: Over NCCL, which wants equal lengths, each worker sends as much as the one with most.
    """
    rank = dist.get_rank(group)
    if own.device.type == "cpu":
        shares[rank].copy_(own)
        peers = [peer for peer in range(len(shares)) if peer != rank]
        _wait(start_messages([(shares[p], p) for p in peers], [(own, p) for p in peers], group))
        return
    longest = max(map(len, shares))
    if not longest:
        return
    padded = own.new_zeros(longest)
    padded[: len(own)] = own
    whole = own.new_empty(len(shares), longest)
    all_gather(whole, padded, group)
    for share, row in zip(shares, whole, strict=True):
        share.copy_(row[: len(share)])


def all_to_all(found: Tensor, shares: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `found` with what each worker has for this one, by rank; share r of `shares` goes to worker r.

    `found` is other memory than `shares`; each has as many shares as there are workers.
    """
    if shares.device.type != "cpu":
        dist.all_to_all_single(found, shares, group=group)
        return
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    here, there = found.view(size, -1), shares.view(size, -1)
    here[rank].copy_(there[rank])
    _exchange(here, there, group)


def all_to_all_uneven(
    sends: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send a flat tensor of any length to each worker, and return what each has sent, both by rank.

    `sends` are of one type; this worker's own comes back as it is. `sizes` are the elements that come from
    each.
    """
    rank, like = dist.get_rank(group), sends[0]
    found = [like.new_empty(size) for size in sizes]
    found[rank] = sends[rank]
    if like.device.type != "cpu":
        # NCCL's all-to-all writes this worker's own as well, which must not be written into what is sent.
        received = [torch.empty_like(sends[rank]) if p == rank else f for p, f in enumerate(found)]
        dist.all_to_all(received, [*sends], group=group)
        return received
    others = [peer for peer in range(len(sends)) if peer != rank]
    receives = [(found[peer], peer) for peer in others]
    _wait(start_messages(receives, [(sends[peer], peer) for peer in others], group))
    return found


def reduce_scatter(
    share: Tensor, whole: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM
) -> None:
    """Fill `share` with this worker's share of the sum of `whole`; None is the group of the whole job.

    `share` may be its place in `whole`, which has as many shares as there are workers, by rank.
    """
    _reduce(share, whole, op=op, group=group)


def start_messages(
    receives: Iterable[tuple[Tensor, int]],
    sends: Iterable[tuple[Tensor, int]],
    group: dist.ProcessGroup | None,
) -> tuple[list[dist.Work | None], list[dist.Work | None]]:
    """Start messages over gloo, each a flat tensor and the position of the other worker in the group.

    Receives come in the order in which the other worker sends, and sends in that in which it receives.

    Returns:
        The works of what is received, and of what is sent; None for empty tensors, which do not travel.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None, "messages are sent within a job"
    # A message leaves once its receiver has said where it goes, so that comes first.
    # The group's own calls: `dist.irecv` takes 12 us more, to check what is known here. Source: torch 2.13,
    # one core; a small exchange of two workers takes 84 us with it and 54 without.
    arriving = [
        group.recv([tensor], peer, _TAG) if tensor.numel() else None for tensor, peer in receives
    ]
    leaving = [
        group.send([tensor], peer, _TAG) if tensor.numel() else None for tensor, peer in sends
    ]
    return arriving, leaving


def _exchange(here: Tensor, there: Tensor, group: dist.ProcessGroup | None) -> None:
    """Receive row r of `here` from each other worker r, which is sent row r of `there`."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    others = [(rank + distance) % size for distance in range(1, size)]
    _wait(
        start_messages(
            # The nearest ranks are sent to first, and each receives first from who sends to it first.
            [(here[peer], peer) for peer in reversed(others)],
            [(there[peer], peer) for peer in others],
            group,
        )
    )


def _wait(started: tuple[list[dist.Work | None], list[dist.Work | None]]) -> None:
    for work in itertools.chain(*started):
        if work is not None:
            work.wait()
