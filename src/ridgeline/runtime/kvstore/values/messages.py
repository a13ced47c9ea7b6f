"""Messages between the workers of a synchronous store: flat tensors of any sizes, all at once."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.workers.flat_collectives import start_messages


def exchange(
    sends: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send one flat tensor to each worker, and return what each has sent.

    Args:
        sends: By position of the receiver, all of one type; this worker's own comes back as it is.
        sizes: Elements that come from each.
        group: Of the workers, all of whom call this.
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
    arriving, leaving = start_messages(
        [(found[peer], peer) for peer in others], [(sends[peer], peer) for peer in others], group
    )
    for work in (*arriving, *leaving):
        if work is not None:
            work.wait()
    return found


def exchange_bytes(payload: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """What each worker brings, by position."""
    size = dist.get_world_size(group)
    # At least one byte: `frombuffer` refuses none.
    mine = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8).to(device)
    length = torch.tensor([len(payload)], device=device)
    lengths = [int(one) for one in exchange([length] * size, [1] * size, group)]
    found = exchange([mine] * size, [max(one, 1) for one in lengths], group)
    return [
        bytes(one.cpu().numpy().tobytes()[:length])
        for one, length in zip(found, lengths, strict=True)
    ]
