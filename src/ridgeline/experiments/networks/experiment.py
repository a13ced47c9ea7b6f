"""`run`: the experiment on this machine, network by network, each task in a process of its own."""

import datetime
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec

from ridgeline.experiments.contests import Progress, silent, versions
from ridgeline.experiments.networks.catalog import catalog, chosen
from ridgeline.experiments.networks.network import Network
from ridgeline.experiments.networks.process import ENDED, Children, ChildReply
from ridgeline.experiments.networks.request import (
    NetworkAnswer,
    NetworkRequest,
    NetworkSettings,
    Task,
)
from ridgeline.experiments.networks.result import (
    NetworkResult,
    NetworksExperiment,
    NetworkTerms,
)
from ridgeline.experiments.networks.results.combine import best_by_hand, combined
from ridgeline.experiments.networks.results.text import network_line
from ridgeline.experiments.networks.settings import (
    NetworkSlot,
    environment_of,
    settings_for,
    slots_of,
)
from ridgeline.probe.host.fingerprint import devices, host

QUICK = ("small_mlp", "message_passing", "lstm_language_model")
"""Networks of the quick experiment: launches alone, indices, and a library's recurrent layers."""
QUICK_TASKS: tuple[Task, ...] = ("contest", "check")
WITHOUT_BYTECODE = (
    "PYTHONDONTWRITEBYTECODE is set: unless bytecode is there, each start compiles Ridgeline's sources, "
    "seconds that no installed package needs; unset it to compare starts"
)


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    names: Sequence[str] = (),
    sources: Sequence[str] = (),
    settings: NetworkSettings | None = None,
    earlier: NetworksExperiment | None = None,
    publish: Callable[[NetworksExperiment], None] = lambda experiment: None,
    progress: Progress = silent,
) -> NetworksExperiment:
    """Train networks in every form, ours and the plain ones, and compare them in turns.

    Args:
        quick: At most three networks, small ones, without the times of first starts.
        only: Kinds of networks to take, by words that they contain; none: all.
        names: Networks to take; none: all of those kinds.
        sources: Files with networks of the user's, as `catalog` takes them.
        settings: How; None: as is usual on this machine.
        earlier: A result to continue with: networks that were run in it are not run again.
        publish: Called with all that is known whenever a task on a network is done.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: no such networks or kinds, or more GPUs are asked for than there are.

    Cost: Compiles every network several times: minutes for each on a GPU.
    """
    how = settings or (
        settings_for(scale="cpu", turns=3, tasks=QUICK_TASKS) if quick else settings_for()
    )
    how = msgspec.structs.replace(how, sources=tuple(sources))
    wanted = chosen(names, only, sources=sources, several_workers=how.workers > 1)
    if quick:
        # Where the user chose others, the first of those.
        wanted = ([one for one in wanted if one.name in QUICK] or wanted)[: len(QUICK)]
    before = {one.network: one for one in earlier.networks} if earlier is not None else {}
    # One with a reason was skipped, or ended before it was done.
    done = {name for name, one in before.items() if not one.reason}
    todo = [network for network in wanted if network.name not in done]
    slots = slots_of(how)
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
        settings: NetworkSettings,
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
        self._children = Children()
        self._is_over = False
        self._lock = threading.Lock()

    def examine_all(
        self, networks: Sequence[Network], slots: Sequence[NetworkSlot], folder: Path
    ) -> None:
        """Every network, with a result for those that no time is left for."""
        free: queue.SimpleQueue[NetworkSlot] = queue.SimpleQueue()
        for slot in slots:
            free.put(slot)
        base = folder / "machine"

        def examine(network: Network) -> None:
            slot = free.get()
            try:
                if slot.cores:
                    os.sched_setaffinity(0, slot.cores)  # of this thread, and what it starts
                self._examine(network, slot, folder / network.name, base)
            finally:
                free.put(slot)

        with ThreadPoolExecutor(len(slots)) as pool:
            try:
                if networks and not (self._settings.is_warm or self._settings.machine):
                    # In a thread of the pool, which is the one whose cores are set, and not in the user's.
                    pool.submit(self._measure, slots[0], base).result()
                for future in as_completed([pool.submit(examine, one) for one in networks]):
                    future.result()
            except BaseException:
                # An interrupt too: what is on its way is ended, or the pool waits for it.
                self._is_over = True
                pool.shutdown(wait=False, cancel_futures=True)
                self._children.end()
                raise

    def _keep(self, result: NetworkResult) -> None:
        """Publish a result with those before it, in the order of the catalog; the user's own come last."""
        # Networks in other slots end at any time.
        with self._lock:
            self._results[result.network] = result
            names = [*catalog(), *self._results]
            ordered = sorted(self._results.values(), key=lambda one: names.index(one.network))
            self.experiment = msgspec.structs.replace(self.experiment, networks=tuple(ordered))
            self._publish(self.experiment)

    def _measure(self, slot: NetworkSlot, base: Path) -> None:
        """Measure the machine once; every network begins with a copy of this profile."""
        if slot.cores:
            os.sched_setaffinity(0, slot.cores)
        self._progress("measuring the machine")
        base.mkdir()
        reply = self._ask("machine", "", slot, base)
        reason = (f"the machine was not measured ahead: {reply.reason}",) if reply.reason else ()
        notes = (*self.experiment.notes, *reason)
        self.experiment = msgspec.structs.replace(
            self.experiment, machine_s=reply.answer.first_s, notes=notes
        )

    def _examine(self, network: Network, slot: NetworkSlot, folder: Path, base: Path) -> None:
        """Publish what there is after each task: who ends the experiment keeps what was measured."""
        result = combined(network, {}, 0.0, self._reason_to_skip(network))
        if result.reason:
            self._keep(result)
            self._progress(network_line(result))
            return
        folder.mkdir()
        # A copy for each, since the profile grows by what its operators take.
        if (base / "cache").is_dir():
            shutil.copytree(base / "cache", folder / "cache")
        begin = time.perf_counter()
        replies: dict[Task, ChildReply] = {}
        by_hand: tuple[str, ...] | None = None
        tasks = self._settings.tasks
        for done, task in enumerate(tasks, start=1):
            self._progress(f"{network.name}: {task}")
            replies[task] = self._ask(task, network.name, slot, folder, by_hand)
            if task == "compile" and not replies[task].reason:
                by_hand = best_by_hand(replies[task].answer)
            left = tasks[done - 1 :] if self._is_over else tasks[done:]  # one cut short is not done
            reason = f"ended before it was done: {', '.join(left)}" if left else ""
            result = combined(network, replies, time.perf_counter() - begin, reason)
            self._keep(result)
            if self._is_over:
                break
        # The compiler's caches of this network, which no other one can use.
        shutil.rmtree(folder, ignore_errors=True)
        self._progress(network_line(result))

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
        slot: NetworkSlot,
        folder: Path,
        by_hand: tuple[str, ...] | None = None,
    ) -> ChildReply:
        # Asked here, too: an interrupt may come between two tasks of a network.
        if self._is_over:
            return ChildReply(NetworkAnswer(), ENDED)
        how = self._settings
        request = NetworkRequest(
            task=task,
            network=network,
            how=how,
            by_hand=by_hand,
            plan_cache=str(folder / "plan"),
            peer_cache=str(folder / "peer"),
            answer=str(folder / "answer.json"),
        )
        # Measuring starts workers by itself.
        workers = 1 if task == "machine" else how.workers
        environment = environment_of(request, slot, folder)
        return self._children.ask(
            request, folder, workers=workers, environment=environment, limit_s=how.limit_s
        )


def _blank(how: NetworkSettings, earlier: NetworksExperiment | None) -> NetworksExperiment:
    terms = {name: getattr(how, name) for name in NetworkTerms.__struct_fields__}
    return NetworksExperiment(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        host=host(),
        devices=devices(),
        versions=versions(),
        networks=earlier.networks if earlier is not None else (),
        notes=_notes(how),
        **terms,
    )


def _notes(how: NetworkSettings) -> tuple[str, ...]:
    """What sets the starts of this run apart from those of a user."""
    notes = []
    if how.is_warm:
        notes.append("caches of the user were used: first starts are none")
    if sys.dont_write_bytecode:  # an installed package comes with its bytecode
        notes.append(WITHOUT_BYTECODE)
    return tuple(notes)
