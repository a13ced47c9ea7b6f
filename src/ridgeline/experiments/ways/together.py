"""Cases that several worker processes hold together: asked for and answered as JSON.

A module of such cases has a function `group_cases(world, asked)`, which lists them in every worker alike.
"""

import importlib
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from ridgeline.codec import Value
from ridgeline.errors import TaskError
from ridgeline.experiments.contests import Progress, silent
from ridgeline.experiments.namespaces import NamespaceNetwork, gloo_environment
from ridgeline.experiments.ways.contest import hold
from ridgeline.experiments.ways.experiment import LEAST_S, LIMITS_S, check_names, experiment_of
from ridgeline.experiments.ways.holding import rooms_s
from ridgeline.experiments.ways.result import WayCase, WayExperiment, WayName
from ridgeline.probe.groups.group import run_in_group
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.host.fingerprint import num_cores
from ridgeline.workers.world import World

MOST_OVER = 4.0
"""A group may take so many times the wanted seconds, and `START_S`, before it is ended."""
START_S = 600.0
LOCAL_WORKERS = 2
"""Over gloo, where there are not several GPUs."""


class GroupRequest(Value, frozen=True, kw_only=True):
    """What a group of workers is to hold.

    Attributes:
        home: Module of the cases, with `group_cases`.
        device: `cpu` or `cuda`.
        quick: Fewer and smaller cases.
        only: Names of cases to hold; the others are left out.
        limit_s: Seconds to take, about.
        rate: Of the links between hosts, one a worker; empty for links that are not shaped.
        lacking: Why the workers are no hosts of their own; empty where they are.
        told: File to which worker 0 adds lines about what happens now; empty for none.
    """

    home: str
    device: str
    quick: bool
    only: tuple[str, ...]
    limit_s: float
    rate: str = ""
    lacking: str = ""
    told: str = ""


def hold_together(
    asked: GroupRequest,
    *,
    workers: int,
    threads: int,
    network: NamespaceNetwork | None = None,
    progress: Progress = silent,
) -> tuple[WayCase, ...]:
    """The cases, held by so many workers on this machine.

    Args:
        asked: What they hold.
        workers: How many there are.
        threads: Of torch in each; 0 leaves them.
        network: Gives each worker a host of its own; None: they share this one.
        progress: Takes worker 0's lines about what happens now, within a second or so.

    Raises:
        WorkerError: a worker failed otherwise than in a way, or the group took far too long.

    Cost: Starts the workers, and keeps the machine busy for about `limit_s`.
    """
    environment: dict[str, str] = {}
    prefixes: tuple[Sequence[str], ...] = ()
    if network is not None:
        # As torchrun passes to its workers: what was measured of another network is then measured again.
        environment = {**gloo_environment(), "GROUP_WORLD_SIZE": str(len(network.hosts))}
        prefixes = tuple(host.prefix for host in network.hosts)
    with tempfile.TemporaryDirectory(prefix="ridgeline-told-") as directory:
        told = Path(directory) / "told"
        told.touch()
        pass_on = _Passed(told, progress)
        reply = run_in_group(
            "ridgeline.experiments.ways.together:work",
            msgspec.json.encode(msgspec.structs.replace(asked, told=str(told))),
            workers=workers,
            threads=threads,
            device=asked.device,
            # Late enough that none of a slow machine is ended, and that a hang ends.
            deadline_s=START_S + MOST_OVER * asked.limit_s,
            environment=environment,
            hanging=pass_on,
            prefixes=prefixes,
        )
        # What was written since it was asked last.
        pass_on()
    return msgspec.json.decode(reply, type=tuple[WayCase, ...])


class WorkersPlace(NamedTuple):
    """Where workers hold cases: `cpu` or `cuda`, and how many there are."""

    device: str
    workers: int

    @classmethod
    def of(cls, device: str | None, workers: int | None) -> "WorkersPlace":
        """As asked for; else all GPUs where there are several, and two workers where not."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # A single GPU has nobody to exchange with.
        kind = device or ("cuda" if gpus > 1 else "cpu")
        return cls(kind, workers or (gpus if kind == "cuda" else LOCAL_WORKERS))


def run_together(
    name: WayName,
    home: str,
    cases: Sequence[str],
    *,
    on_gpus: bool = True,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    workers: int | None = None,
    progress: Progress = silent,
) -> WayExperiment:
    """An experiment whose cases workers of this machine hold together.

    Args:
        name: Of the experiment.
        home: Module of the cases.
        cases: All their names.
        on_gpus: Whether GPUs can hold them.
        quick: About a minute instead of three.
        only: Names of cases to hold; none: all.
        limit_s: Seconds to take, about; None: 60 quick, 180 else.
        device: `cpu` or `cuda`; None takes GPUs where there are several.
        workers: None: one for each GPU, or two on a CPU.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: there is no case of a name, or the device is not for these.
        WorkerError: a worker failed otherwise than in a way.

    Cost: Keeps the machine busy for about `limit_s`.
    """
    check_names(name, cases, only)
    if device == "cuda" and not on_gpus:
        raise TaskError(
            f"wanted device 'cpu' for the experiment {name}, got {device!r}; leave it out"
        )
    where = WorkersPlace.of(device if on_gpus else "cpu", workers)
    limit = LIMITS_S[quick] if limit_s is None else limit_s
    asked = GroupRequest(
        home=home,
        device=where.device,
        quick=quick,
        only=tuple(only) or tuple(cases),
        limit_s=limit,
    )
    progress(f"{name}: {where.workers} workers on {where.device}, {len(asked.only)} cases")
    # Workers that each took all cores would be slower than one of them.
    threads = 0 if where.device == "cuda" else max(1, num_cores() // where.workers)
    held = hold_together(asked, workers=where.workers, threads=threads, progress=progress)
    return experiment_of(name, held, quick=quick, limit_s=limit)


def work(request: bytes) -> bytes:
    """Target of `run_in_group`: hold the cases with the others, and reply what came of them."""
    asked = msgspec.json.decode(request, type=GroupRequest)
    world = World.join(device=asked.device)
    peers = Peers.of(world.group())
    # By name, since the request comes as JSON.
    make_cases = importlib.import_module(asked.home).group_cases
    # In the same order on all workers, since every way holds collectives.
    chosen = [case for case in make_cases(world, asked) if case.name in asked.only]
    progress = partial(_tell, Path(asked.told)) if asked.told and world.rank == 0 else silent
    rooms = rooms_s([1.0] * len(chosen), limit_s=asked.limit_s, least_s=LEAST_S)
    held = tuple(
        hold(case, limit_s=room_s, progress=progress, peers=peers)
        for case, room_s in zip(chosen, rooms, strict=True)
    )
    return msgspec.json.encode(held)


class _Passed:
    """Asked once in a while whether a worker hangs: passes on the lines that were added since, says no."""

    def __init__(self, told: Path, progress: Progress) -> None:
        self._told, self._progress = told, progress
        self._seen = 0

    def __call__(self) -> None:
        # Whole lines alone: worker 0 may be in the middle of one.
        whole = self._told.read_bytes()[self._seen :].rpartition(b"\n")[0]
        if whole:
            self._seen += len(whole) + 1
            for line in whole.decode().splitlines():
                self._progress(line)


def _tell(told: Path, line: str) -> None:
    with told.open("a") as file:
        file.write(f"{line}\n")
