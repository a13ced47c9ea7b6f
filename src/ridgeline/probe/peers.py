"""`Peers`: the worker processes that measure one setting together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Peers:
    """This process among the `size` that measure at the same time.

    `group` is None for the default process group, or where `size` is 1.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    def barrier(self) -> None:
        """Wait until all peers are here. Cost: one small all-reduce; nothing when alone."""
        if self.size > 1:
            token = torch.zeros(1, device=self.device)
            dist.all_reduce(token, group=self.group)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def agree(self, decision: bool) -> bool:
        """The decision of rank 0, on all peers, so that loops end together."""
        if self.size == 1:
            return decision
        flag = torch.tensor([float(decision)], device=self.device)
        dist.broadcast(flag, src=0, group=self.group)
        return bool(flag.item())

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of all peers, by rank; each peer gives as many."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        all_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_ranks, mine, group=self.group)
        return [row.tolist() for row in all_ranks]
