"""The prefetcher that many training scripts carry: one batch ahead, copied on a stream of its own."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def prefetched(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Batches on the GPU; the next one's copy is enqueued before this one is given out.

    Args:
        batches: Pinned batches on the CPU, as of a `DataLoader` with `pin_memory`.
    """
    side = torch.cuda.Stream()
    source = iter(batches)
    following = _send(source, side)
    while following is not None:
        torch.cuda.current_stream().wait_stream(side)
        batch = following
        batch.record_stream(torch.cuda.current_stream())
        following = _send(source, side)
        yield batch


def _send(source: Iterator[Tensor], side: torch.cuda.Stream) -> Tensor | None:
    batch = next(source, None)
    if batch is None:
        return None
    with torch.cuda.stream(side):
        return batch.to("cuda", non_blocking=True)
