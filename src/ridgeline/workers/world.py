"""`World`: which worker this process is, of how many that train together, on which device.

A script started by hand is a world of one. Started by `torchrun` (or by `ridgeline train`), the
environment names rank and size, and joining initialises the process group over NCCL or gloo. A script that
has a mesh or a process group of some of its workers may name that: these alone train together then.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ridgeline.errors import LaunchError, PlanError, first_line
from ridgeline.host.memory import keep_freed_memory
from ridgeline.host.message_threads import calm_message_threads
from ridgeline.machine import Setting
from ridgeline.workers import leaving
from ridgeline.workers.host_threads import set_threads
from ridgeline.workers.mesh import Axis, given_group, mesh_over, timeout_of

JOIN = "RIDGELINE_KVSTORE_JOIN"
"""Variable of the environment that names a running training, for a process of its own to take part in."""
_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This worker's place: `rank` of `size` workers, `local_rank` on this host, its device.

    The workers are those that train together: where they are some of a job, `rank` is not that in the job
    (`ranks`).

    Attributes:
        mesh: The workers along named axes; None for a worker alone, outside of any process group.
        joins: Address of a training that runs, in which this worker takes part though it is in no group with
            those who began it; empty: it is none of that kind.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)
    joins: str = ""

    @staticmethod
    def join(
        threads: int = 0,
        device: str | torch.device | None = None,
        *,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
        model: nn.Module | None = None,
    ) -> "World":
        """Find this worker's place and join the process group if there is one to join.

        An already initialised process group is used as it is. A worker that takes part in a training that
        runs (see `joins`, which the environment says) is in a group of its own. A group initialised here is
        left at interpreter exit. Captured graphs are closed before either is destroyed, and at exit. On the
        CPU this process keeps the memory that it frees (see `host.memory`), and the threads that carry
        messages preempt no thread (see `host.message_threads`).

        Args:
            threads: Threads for torch on the CPU; 0 leaves the number as it is.
            device: `cpu` or `cuda`, with this worker's own number or none; None takes that of the mesh, or
                `cuda` where there is a GPU.
            mesh: Its workers along the data axis train together, and not all of the job; see `given_group`.
            process_group: Likewise, its workers.
            model: What it trains; where nothing else tells this worker's GPU, it is that of all parameters.

        Raises:
            LaunchError: `cuda` is wanted where there are fewer GPUs than local workers, another kind of
                device, or a GPU that is not this worker's; or the environment names no group to join.
            PlanError: the mesh or group cannot be trained over, or the mesh is of another device.

        Cost: Blocks until all workers have joined, where the group is initialised here.
        """
        group = given_group(mesh, process_group)
        wanted = None if device is None else _device_of(device)
        local_rank = _local_rank(wanted, model)
        named = None if wanted is None else _kind(wanted, local_rank)
        if mesh is not None and named not in (None, mesh.device_type):
            raise PlanError(
                f"wanted device={mesh.device_type!r}, as the mesh has it, got device={named!r}; leave the "
                "device out, or make the mesh for it"
            )
        if threads:
            set_threads(threads)
        kind = mesh.device_type if mesh is not None else named or _default_kind()
        place = _device(kind, local_rank)
        joins = os.environ.get(JOIN, "")
        is_started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        if not dist.is_initialized() and (is_started or joins):
            # In the memory of this process: one that joins a running training has no rendezvous to ask for a
            # store.
            alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            with _launching():
                _check_rank()
                dist.init_process_group(
                    "nccl" if kind == "cuda" else "gloo",
                    # NCCL makes its communicator now, so that a worker that cannot connect fails here and not
                    # in its first step.
                    device_id=place if kind == "cuda" else None,
                    **({} if is_started else alone),
                )
            leaving.own()
        group = group or dist.group.WORLD
        if group is None:
            return World(0, 1, local_rank, place)
        if kind == "cpu":
            calm_message_threads()
        over = mesh_over(group, "cuda" if kind == "cuda" else "cpu")
        rank, size = dist.get_rank(group=group), dist.get_world_size(group=group)
        return World(rank, size, local_rank, place, over, joins)

    @cached_property
    def process_group(self) -> ProcessGroup | None:
        """The group of all that train together; None for a worker alone, outside of any process group."""
        return None if self.mesh is None else self.mesh.get_group()

    def group(self, axis: Axis | None = None) -> ProcessGroup:
        """The group of those that train together, or of those among them along one axis with this worker.

        A worker alone must not ask.
        """
        group = (
            self.process_group if self.mesh is None or axis is None else self.mesh.get_group(axis)
        )
        assert group is not None, "a worker alone has no group"
        return group

    def on_own_group(self) -> "World":
        """The workers along the data axis in a new group, whose collectives are in no order with others.

        For what exchanges in a thread of its own; on a CPU. Called by all of these workers alike.

        Cost: A rendezvous of them, and connections that are kept until the job's process group ends: under
        the name of a group that ended, torch would find the addresses of that one.
        """
        group = dist.new_group(
            list(self.ranks("data")),
            timeout=timedelta(seconds=self.timeout_s),
            backend="gloo",
            use_local_synchronization=True,  # others of the job may not be here
        )
        assert isinstance(group, ProcessGroup)  # this worker is one of them
        rank, size = self.axis_rank("data"), self.axis_size("data")
        return replace(self, rank=rank, size=size, mesh=mesh_over(group, "cpu"))

    @property
    def timeout_s(self) -> float:
        """How long a collective of all that train together may take; endless for a worker alone."""
        if self.size == 1:
            return math.inf
        return timeout_of(self.group(), self.device)

    @property
    def is_among_others(self) -> bool:
        """Whether others train with this worker, in its group or as those whom it joined."""
        return self.size > 1 or bool(self.joins)

    def axis_size(self, axis: Axis) -> int:
        """Workers along an axis; 1 where the mesh does not have it."""
        names = _names(self.mesh)
        if self.mesh is None or axis not in names:
            return self.size if axis == "data" else 1
        return self.mesh.size(names.index(axis))

    def axis_rank(self, axis: Axis) -> int:
        """This worker's position along an axis; 0 where the mesh does not have it."""
        if self.mesh is None or axis not in _names(self.mesh):
            return self.rank if axis == "data" else 0
        return self.mesh.get_local_rank(axis)

    def ranks(self, axis: Axis | None = None) -> tuple[int, ...]:
        """Ranks in the job, by position, of all that train together or of those along an axis."""
        if self.mesh is None:
            return tuple(range(self.size))
        part = self.mesh if axis is None or self.mesh.ndim == 1 else self.mesh[axis]
        return tuple(part.mesh.flatten().tolist())

    def root(self, axis: Axis | None = None) -> int:
        """Rank in the job of the first of `ranks`."""
        return self.ranks(axis)[0]

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
        """Raise a PlanError where the process group of several workers has been destroyed."""
        if self.size == 1:
            return
        group = self.process_group
        if group is None or not leaving.is_open(group):
            raise PlanError(
                f"wanted an open process group of {self.size} workers, got one that was destroyed (rank "
                f"{self.ranks()[self.rank]}); train and choose before destroy_process_group(), or join a "
                "group and make a new TrainStep"
            )

    @staticmethod
    def leave() -> None:
        """Leave the process group, if any; safe to call twice. While an error is handled, abort it."""
        leaving.leave()


@contextlib.contextmanager
def _launching() -> Iterator[None]:
    """Inside, the group is joined that the environment names."""
    try:
        yield
    except (ValueError, dist.DistError) as error:
        told = f"{type(error).__name__}: {first_line(error, '')}"
        got = ", ".join(f"{name}={os.environ.get(name)}" for name in _LAUNCH)
        raise LaunchError(
            f"wanted a process group to join by {', '.join(_LAUNCH)}, got {got}: {told}; start "
            "all workers by torchrun, which sets these on each and finds a free port, or remove them to "
            "train alone"
        ) from error


def _check_rank() -> None:
    """See that the environment names a place among the workers: where it is none, torch waits for ever."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        # One that joins a running training has none; of what is no number torch tells.
        return
    if not 0 <= rank < size:
        raise ValueError(f"of {size} workers none has rank {rank}, the first has rank 0")


def _local_rank(wanted: torch.device | None, model: nn.Module | None) -> int:
    """This worker's number on its host, and that of its GPU; `wanted` is its device as it was given.

    `torchrun` says it. A script that starts workers itself (`torch.multiprocessing.spawn`) names each one's
    GPU: here, by where it puts the model, or by `torch.cuda.set_device`.
    """
    told = os.environ.get("LOCAL_RANK")
    if told is not None:
        if not told.isdecimal():
            raise LaunchError(
                f"wanted this worker's number on its host in LOCAL_RANK, got LOCAL_RANK={told}; start all "
                "workers by torchrun, which sets it on each, or remove it"
            )
        return int(told)
    kind = _default_kind() if wanted is None else wanted.type
    if kind != "cuda":
        return 0
    if wanted is not None and wanted.index is not None:
        return wanted.index
    held = set() if model is None else {parameter.device for parameter in model.parameters()}
    if len(held) == 1 and (place := held.pop()).type == "cuda":
        return place.index
    return torch.cuda.current_device() if dist.is_initialized() else 0


def _default_kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_of(device: str | torch.device) -> torch.device:
    """What a user may write for this worker's device."""
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LaunchError(f"wanted device='cpu' or 'cuda', got {device!r}") from error
    if named.type not in ("cpu", "cuda"):
        raise LaunchError(
            f"wanted device='cpu' or 'cuda', got {str(named)!r}; Ridgeline trains on these two"
        )
    return named


def _kind(named: torch.device, local_rank: int) -> str:
    """`cpu` or `cuda`, of this worker's device, which has its number or none."""
    if named.type == "cuda" and named.index not in (None, local_rank):
        raise LaunchError(
            f"wanted device='cuda', which is cuda:{local_rank} for local rank {local_rank}, got "
            f"{str(named)!r}; start with CUDA_VISIBLE_DEVICES={named.index} to train on that GPU alone"
        )
    return named.type


def _device(kind: str, local_rank: int) -> torch.device:
    """The device of a worker, made the current one if it is a GPU."""
    if kind == "cpu":
        keep_freed_memory()
    if kind != "cuda":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"wanted one GPU per worker, got {torch.cuda.device_count()} GPUs for local rank "
            f"{local_rank}; start at most {torch.cuda.device_count()} workers on this host"
        )
    place = torch.device("cuda", local_rank)
    torch.cuda.set_device(place)
    return place


def _names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    return () if mesh is None else mesh.mesh_dim_names or ()
