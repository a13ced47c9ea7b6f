"""`World`: which worker this process is, of how many, on which device.

A script started by hand is a world of one. Started by `torchrun` (or by `ridgeline train`), the
environment names rank and size, and joining initialises the process group over NCCL or gloo.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ridgeline.errors import LaunchError, PlanError
from ridgeline.host_memory import keep_freed_memory
from ridgeline.machine import Setting
from ridgeline.runtime import leaving


@dataclass(frozen=True)
class World:
    """This worker's place: `rank` of `size` workers, `local_rank` on this host, its device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @staticmethod
    def join(threads: int = 0, device: str | None = None) -> "World":
        """Find this worker's place and join the process group if there is one to join.

        An already initialised process group is used as it is. A group initialised here is left at
        interpreter exit. Captured graphs are closed before either is destroyed, and at exit. On the CPU
        this process keeps the memory that it frees; see `host_memory`.

        Args:
            threads: Threads for torch on the CPU; 0 leaves the number as it is.
            device: `cpu` or `cuda`; None takes `cuda` where there is a GPU.

        Raises:
            LaunchError: `cuda` is wanted where there are fewer GPUs than local workers.

        Cost: Blocks until all workers have joined.
        """
        if threads:
            torch.set_num_threads(threads)
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        place = torch.device("cpu")
        if kind == "cpu":
            keep_freed_memory()
        if kind == "cuda":
            if local_rank >= torch.cuda.device_count():
                raise LaunchError(
                    f"wanted one GPU per worker, got {torch.cuda.device_count()} GPUs for local rank "
                    f"{local_rank}; start at most {torch.cuda.device_count()} workers on this host"
                )
            place = torch.device("cuda", local_rank)
            torch.cuda.set_device(place)
        if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(
                "nccl" if kind == "cuda" else "gloo",
                device_id=place if kind == "cuda" else None,
            )
            leaving.own()
        if not dist.is_initialized():
            return World(0, 1, local_rank, place)
        return World(dist.get_rank(), dist.get_world_size(), local_rank, place)

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The kind of the device."""
        return "cuda" if self.device.type == "cuda" else "cpu"

    @property
    def threads(self) -> int:
        """Threads that torch uses on the CPU in this process; 0 when the device is a GPU."""
        return 0 if self.device.type == "cuda" else torch.get_num_threads()

    @property
    def setting(self) -> Setting:
        """How the devices are shared while all workers train."""
        return Setting(device=self.kind, workers=self.size, threads=self.threads)

    def check_open(self) -> None:
        """See that the process group of several workers has not been destroyed.

        Raises:
            PlanError: it has.
        """
        if self.size > 1 and not dist.is_initialized():
            raise PlanError(
                f"wanted an open process group of {self.size} workers, got one that was destroyed (rank "
                f"{self.rank}); train and choose before destroy_process_group(), or join a group and make a "
                "new TrainStep"
            )

    @staticmethod
    def close_before_leaving(resource: leaving.Closable) -> None:
        """Have `resource` closed before the group is left, unless it is gone by then.

        A captured graph that outlives the group whose collectives it holds makes the process hang.
        """
        leaving.close_before_leaving(resource)

    @staticmethod
    def abandon(reason: str) -> None:
        """After a failed capture the device refuses all work: the group will be aborted, not left."""
        leaving.abandon(reason)

    @staticmethod
    def leave() -> None:
        """Leave the process group, if any; safe to call twice. While an error is handled, abort it."""
        leaving.leave()
