"""`Peers`: the worker processes that measure one setting together."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from ridgeline.workers.mesh import timeout_of

T = TypeVar("T")
WORDS_A_TIMEOUT = 4
"""How often rank 0 says that it is not done, within the time-out of the group, to peers that wait for it."""


@dataclass(frozen=True)
class Peers:
    """This process, at position `rank` among the `size` of a group that measure at the same time.

    `group` is None where `size` is 1.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device | None = None) -> Self:
        """All workers of a group, or this process alone.

        Args:
            group: None for that of the whole job, if there is one.
            device: On which they measure; None: the current GPU where NCCL is their backend, else the CPU.
        """
        if group is None and dist.is_available():
            group = dist.group.WORLD
        if group is None:
            return cls(0, 1, device or torch.device("cpu"))
        if device is None:
            device = torch.device("cuda" if dist.get_backend(group=group) == "nccl" else "cpu")
        return cls(dist.get_rank(group=group), dist.get_world_size(group=group), device, group)

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
        dist.broadcast(flag, group=self.group, group_src=0)
        return bool(flag.item())

    def done_by_first(self, work: Callable[[], T]) -> T | None:
        """What rank 0 comes to, which the others wait for however long it takes; None on these.

        Cost: Beside the work of rank 0 a small broadcast now and then, see `WORDS_A_TIMEOUT`.
        """
        if self.rank:
            while not self.agree(True):
                pass
            return None
        with self._saying_not_yet() if self.group is not None else contextlib.nullcontext():
            return work()

    @contextlib.contextmanager
    def _saying_not_yet(self) -> Iterator[None]:
        """Inside, the others are told that it is not over, else they would take rank 0 for lost."""
        assert self.group is not None
        every_s = timeout_of(self.group, self.device) / WORDS_A_TIMEOUT
        is_over = threading.Event()

        def say() -> None:
            with contextlib.suppress(RuntimeError):  # of who is gone hears the next exchange
                while not is_over.wait(every_s):
                    self.agree(False)

        thread = threading.Thread(target=say, name="ridgeline-not-yet", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self.agree(True)

    def share(self, data: bytes) -> bytes:
        """The bytes of rank 0, on all peers; what the others give is ignored."""
        if self.size == 1:
            return data
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, group=self.group, group_src=0)
        body = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(body, group=self.group, group_src=0)
        return bytes(body.cpu().tolist())

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of all peers, by rank; each peer gives the same number."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        all_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_ranks, mine, group=self.group)
        return [row.tolist() for row in all_ranks]
