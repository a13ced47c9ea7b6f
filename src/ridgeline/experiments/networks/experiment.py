"""`run`: the experiment on this machine, network by network, each task in a process of its own."""

import datetime
import os
import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from ridgeline.codec import VERSION, Value
from ridgeline.errors import TaskError
from ridgeline.experiments.contests import Progress
from ridgeline.experiments.networks.catalog import chosen
from ridgeline.experiments.networks.combine import best_by_hand, combined
from ridgeline.experiments.networks.network import Network, Scale
from ridgeline.experiments.networks.process import Reply, ask
from ridgeline.experiments.networks.request import TASKS, Request, Task
from ridgeline.experiments.networks.result import NetworkResult, NetworksExperiment
from ridgeline.experiments.networks.text import network_line
from ridgeline.probe.fingerprint import devices, driver, host

QUICK = ("small_mlp", "message_passing", "lstm_language_model")
"""Networks of the quick experiment: launches alone, indices, and a library's recurrent layers."""
QUICK_TASKS: tuple[Task, ...] = ("contest", "check")
TURNS = {"cpu": 5, "cuda": 9}
STEPS = {"cpu": 0, "cuda": 20}
"""Turns, and steps in each, by device; 0: as many as fill a turn."""


class Settings(Value, frozen=True, kw_only=True):
    """How the experiment is run.

    Attributes:
        device: `cpu` or `cuda`.
        scale: Of the networks.
        allow: Changes of the maths that all forms may make.
        turns: Turns of the timing.
        steps: Steps in a turn; 0: as many as fill one.
        budget_s: What `TrainStep` gets to choose in; None: its own.
        workers: Processes that train a network together.
        parallel: Networks at the same time, each on its own GPU and share of the cores.
        tasks: What to do with each network.
        limit_s: A task that takes longer is ended.
        stop_after_s: No network begins after so many seconds; None: all do.
        is_warm: Use this user's own caches instead of empty ones.
        machine: File of a machine profile to use; empty: the machine is measured.
    """

    device: Literal["cpu", "cuda"]
    scale: Scale
    allow: tuple[str, ...] = ()
    turns: int
    steps: int
    budget_s: float | None = None
    workers: int = 1
    parallel: int = 1
    tasks: tuple[Task, ...] = TASKS
    limit_s: float = 600.0
    stop_after_s: float | None = None
    is_warm: bool = False
    machine: str = ""


class Slot(NamedTuple):
    """Where one network runs: its GPU's number in the environment, and its cores; empty: all of them."""

    gpu: str = ""
    cores: frozenset[int] = frozenset()


def settings_for(device: str | None = None, **changes: object) -> Settings:
    """The usual settings on a device, with changes; those that are None change nothing.

    Args:
        device: `cpu` or `cuda`; None takes the GPU where there is one.
        **changes: Fields of `Settings`.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    if device in ("cpu", "cuda"):
        kind = "cpu" if device == "cpu" else "cuda"
    usual = Settings(
        device=kind,
        scale="gpu" if kind == "cuda" else "cpu",
        allow=("bf16", "random") if kind == "cuda" else (),
        turns=TURNS[kind],
        steps=STEPS[kind],
    )
    given = {name: value for name, value in changes.items() if value is not None}
    return msgspec.structs.replace(usual, **given)


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    names: Sequence[str] = (),
    settings: Settings | None = None,
    earlier: NetworksExperiment | None = None,
    publish: Callable[[NetworksExperiment], None] = lambda experiment: None,
    progress: Progress = lambda line: None,
) -> NetworksExperiment:
    """Train networks in every form, ours and the plain ones, and compare them in turns.

    Args:
        quick: At most three networks, small ones, without the times of first starts.
        only: Kinds of networks to take, by words that they contain; none: all.
        names: Networks to take; none: all of those kinds.
        settings: How; None: as is usual on this machine.
        earlier: A result to go on with: networks that it has are not run again.
        publish: Called with all that is known whenever a network is done.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: no such networks or kinds, or more GPUs are asked for than there are.

    Cost: Compiles every network several times: minutes for each on a GPU.
    """
    how = settings or (
        settings_for(scale="cpu", turns=3, tasks=QUICK_TASKS) if quick else settings_for()
    )
    wanted = chosen(names, only, several_workers=how.workers > 1)
    if quick:
        wanted = ([one for one in wanted if one.name in QUICK] or wanted)[: len(QUICK)]
    before = {one.network: one for one in earlier.networks} if earlier is not None else {}
    todo = [network for network in wanted if network.name not in before]
    slots = _slots(how)
    fleet = _Fleet(how, _blank(how, earlier), before, publish, progress)
    with tempfile.TemporaryDirectory(
        prefix="ridgeline-networks-", ignore_cleanup_errors=True
    ) as folder:
        fleet.examine_all(todo, slots, Path(folder))
    return fleet.experiment


class _Fleet:
    """Takes networks through their tasks, several at a time where there are several slots."""

    def __init__(
        self,
        settings: Settings,
        experiment: NetworksExperiment,
        results: dict[str, NetworkResult],
        publish: Callable[[NetworksExperiment], None],
        progress: Progress,
    ) -> None:
        self.experiment = experiment
        self._settings = settings
        self._results = results
        self._publish = publish
        self._progress = progress
        self._begin = time.perf_counter()

    def examine_all(self, networks: Sequence[Network], slots: Sequence[Slot], folder: Path) -> None:
        """Every network, with a result for those that no time is left for."""
        free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in slots:
            free.put(slot)
        base = folder / "machine"

        def examine(network: Network) -> NetworkResult:
            slot = free.get()
            try:
                if slot.cores:
                    os.sched_setaffinity(0, slot.cores)  # of this thread, and what it starts
                return self._examine(network, slot, folder / network.name, base)
            finally:
                free.put(slot)

        with ThreadPoolExecutor(len(slots)) as pool:
            if networks and not (self._settings.is_warm or self._settings.machine):
                pool.submit(self._measure, slots[0], base).result()
            for result in pool.map(examine, networks):
                self._results[result.network] = result
                ordered = tuple(self._results.values())
                self.experiment = msgspec.structs.replace(self.experiment, networks=ordered)
                self._publish(self.experiment)
                self._progress(network_line(result))

    def _measure(self, slot: Slot, base: Path) -> None:
        """Measure the machine once; every network begins with a copy of this profile."""
        if slot.cores:
            os.sched_setaffinity(0, slot.cores)
        self._progress("measuring the machine")
        base.mkdir()
        reply = self._ask("machine", "", slot, base)
        reason = (f"the machine was not measured ahead: {reply.reason}",) if reply.reason else ()
        self.experiment = msgspec.structs.replace(
            self.experiment, machine_s=reply.answer.first_s, notes=reason
        )

    def _examine(self, network: Network, slot: Slot, folder: Path, base: Path) -> NetworkResult:
        reason = self._reason_to_skip(network)
        if reason:
            return NetworkResult(
                network=network.name, kind=network.kind, title=network.title, reason=reason
            )
        folder.mkdir()
        if (base / "cache").is_dir():
            shutil.copytree(base / "cache", folder / "cache")
        begin = time.perf_counter()
        replies: dict[Task, Reply] = {}
        by_hand: tuple[str, ...] | None = None
        for task in self._settings.tasks:
            self._progress(f"{network.name}: {task}")
            replies[task] = self._ask(task, network.name, slot, folder, by_hand)
            if task == "compile" and not replies[task].reason:
                by_hand = best_by_hand(replies[task].answer)
        shutil.rmtree(folder, ignore_errors=True)
        return combined(network, replies, time.perf_counter() - begin)

    def _reason_to_skip(self, network: Network) -> str:
        if network.missing:
            return f"needs {', '.join(network.missing)}, which is not installed"
        limit_s = self._settings.stop_after_s
        if limit_s is not None and time.perf_counter() - self._begin > limit_s:
            return f"not begun within {limit_s:.0f} s"
        return ""

    def _ask(
        self,
        task: Task,
        network: str,
        slot: Slot,
        folder: Path,
        by_hand: tuple[str, ...] | None = None,
    ) -> Reply:
        how = self._settings
        request = Request(
            task=task,
            network=network,
            device=how.device,
            scale=how.scale,
            allow=how.allow,
            turns=how.turns,
            steps=how.steps,
            budget_s=how.budget_s,
            by_hand=by_hand,
            plan_cache=str(folder / "plan"),
            peer_cache=str(folder / "peer"),
            answer=str(folder / "answer.json"),
            machine=how.machine,
        )
        workers = 1 if task == "machine" else how.workers
        environment = _environment(request, slot, how, folder)
        return ask(request, folder, workers=workers, environment=environment, limit_s=how.limit_s)


def _environment(request: Request, slot: Slot, how: Settings, folder: Path) -> dict[str, str]:
    """Caches of its own for a child, its GPU, and its share of the cores."""
    found: dict[str, str] = {}
    if not how.is_warm:
        cache = request.peer_cache if request.task.startswith("compile") else request.plan_cache
        found |= {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
    if slot.gpu:
        found["CUDA_VISIBLE_DEVICES"] = slot.gpu
    if how.workers > 1:
        cores = len(slot.cores) or len(os.sched_getaffinity(0))
        found["OMP_NUM_THREADS"] = str(max(1, cores // how.workers))
    return found


def _slots(how: Settings) -> list[Slot]:
    """As many places as networks run at a time.

    Raises:
        TaskError: there are fewer GPUs.
    """
    if how.parallel == 1:
        return [Slot()]
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]
    if how.device != "cuda" or how.workers > 1 or how.parallel > len(gpus):
        raise TaskError(
            f"wanted a GPU for each of {how.parallel} networks at a time, got {len(gpus)} GPUs, device "
            f"{how.device} and {how.workers} workers for each; run fewer at a time"
        )
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // how.parallel)
    return [
        Slot(gpus[index], frozenset(cores[index * share : (index + 1) * share]))
        for index in range(how.parallel)
    ]


def _blank(how: Settings, earlier: NetworksExperiment | None) -> NetworksExperiment:
    versions = {"ridgeline": VERSION, "torch": str(torch.__version__)}
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "driver": driver()}
    notes = ("caches of the user were used: first starts are none",) if how.is_warm else ()
    return NetworksExperiment(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        host=host(),
        devices=devices(),
        versions=versions,
        device=how.device,
        scale=how.scale,
        workers=how.workers,
        allow=how.allow,
        turns=how.turns,
        steps=how.steps,
        budget_s=how.budget_s,
        parallel=how.parallel,
        networks=earlier.networks if earlier is not None else (),
        notes=notes,
    )
