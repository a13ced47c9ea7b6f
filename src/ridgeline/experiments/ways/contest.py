"""One case held: every way made, its results checked, then all timed in turns beside the parts."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.experiments.contests import (
    FAILURES,
    Progress,
    dismiss,
    reason_of,
    release_memory,
    torch_threads,
    wall_s,
)
from ridgeline.experiments.turns import Samples, times_faster
from ridgeline.experiments.ways.case import Bound, Case, Contest, Way, WayRunner
from ridgeline.experiments.ways.holding import Holding, Turn, attempted
from ridgeline.experiments.ways.result import LowerBound, WayCase, WayRow, hidden_share
from ridgeline.machine import Quantity
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.timing import synchronize
from ridgeline.recording.turns import calls_in

TURN_S = 0.05
"""What one turn of the first way takes, at least."""
NO_NUMBER = 1e30
"""The difference of a result that is NaN or infinite, for which JSON has no number."""
CHECKED_ELEMENTS = 1 << 16
"""Of each result; results of gigabytes are compared at evenly spaced elements."""


def hold(case: Case, *, limit_s: float, progress: Progress, peers: Peers | None = None) -> WayCase:
    """Hold a case; nothing of it is left afterwards.

    Args:
        case: What is done.
        limit_s: What timing may take, about; at least three turns are taken.
        progress: Takes lines about what happens now.
        peers: Workers that all hold this case, to do its work together; a run begins when all are there, and
            takes as long as the slowest. None: it is held by this process alone.

    Cost: Keeps the machine busy for about `limit_s`, and synchronises the devices.
    """
    without = WayCase(name=case.name, title=case.title, unit=case.unit)
    if case.lacking:
        return msgspec.structs.replace(without, skipped=case.lacking)
    begin = time.perf_counter()
    # A group of one agrees at once, so that both kinds of cases are held alike.
    together = peers or Peers(0, 1, torch.device("cpu"))
    with torch_threads(case.threads):
        try:
            contest = case.prepare()
        except FAILURES as error:  # no memory for the inputs, say: the other cases stand
            release_memory()
            return msgspec.structs.replace(without, skipped=reason_of(error))
        try:
            return _Hold(case, contest, progress, together).result(begin, limit_s)
        finally:
            release_memory()


class _Hold(Holding[WayRow, WayRunner]):
    """The rows of one case as they come to be."""

    def __init__(self, case: Case, contest: Contest, progress: Progress, peers: Peers) -> None:
        super().__init__(progress)
        self._case = case
        self._contest = contest
        self._peers = peers
        self._wanted: list[Tensor] | None = None

    def result(self, begin: float, limit_s: float) -> WayCase:
        try:
            for way in self._contest.ways:
                self._progress(f"{self._case.name}: {way.name}")
                self._rows[way.name] = self._admit(way)
            self._progress(f"{self._case.name}: taking turns")
            samples, calls = self._time(max(1.0, limit_s - (time.perf_counter() - begin)))
        finally:
            self._close()
        return self._completed(samples, calls, begin)

    def _admit(self, way: Way) -> WayRow:
        """Make a way and check its results; its row, still without times."""
        row = WayRow(name=way.name, kind=way.kind)
        if way.lacking:
            return msgspec.structs.replace(row, status="skipped", reason=way.lacking)
        runner: WayRunner | None = None
        failure: Exception | None = None
        gap = 0.0
        try:
            runner = way.make()
            with torch_threads(runner.threads):
                seen = observed(_results(runner))
            if self._wanted is None:
                self._wanted = seen
            gap = difference(seen, self._wanted)
        except FAILURES as error:
            failure = error
        # Infinity stands for a failure, since numbers are gathered and every worker has to take part.
        gaps = [gap for (gap,) in self._peers.gather([math.inf if failure else gap])]
        if runner is None or failure is not None or math.inf in gaps:
            if runner is not None:
                dismiss(runner.close)
            return self._failed(row, failure or RuntimeError("it failed on another worker"))
        self._made[way.name] = runner
        return msgspec.structs.replace(row, difference=max(gaps))

    def _time(self, limit_s: float) -> tuple[Samples, int]:
        """Seconds of a run of everyone that runs and of every part, and the runs in a turn."""
        if not self._made:
            return {}, 0
        runners = dict(self._made)
        calls = self._case.calls or self._calls(next(iter(runners.values())))
        bound = self._contest.bound
        for name, run in (bound.parts if bound else {}).items():
            runners[name] = WayRunner(run=run)
            self._rows[name] = WayRow(name=name, kind="part")
        measures = {name: self._measure(runner, calls) for name, runner in runners.items()}
        return self._turns(measures, limit_s=limit_s, agree=self._peers.agree), calls

    def _calls(self, first: WayRunner) -> int:
        """Runs that fill a turn, of the first way on the first worker."""
        with torch_threads(first.threads):
            once_s = min(wall_s(first.run) for _ in range(2)) / first.units
        # One number for all: with other numbers of runs some would wait for the rest for ever.
        return int(self._peers.gather([calls_in(TURN_S, once_s)])[0][0])

    def _measure(self, runner: WayRunner, calls: int) -> Callable[[], Turn]:
        def mean_s() -> float:
            with torch_threads(runner.threads):
                # A run of several units is no less a turn than several runs of one.
                seconds = wall_s(runner.run, -(-calls // runner.units)) / runner.units
                runner.settle()
                return seconds

        def measure() -> Turn:
            # All are idle then: what others still sent would count to this turn.
            self._peers.barrier()
            runner.before_turn()
            seconds, failure = attempted(mean_s)
            slowest = max(own for (own,) in self._peers.gather([seconds]))
            # Behind the gathering, by which others say that they have received everything.
            runner.after_turn()
            if math.isfinite(slowest):
                return slowest, None
            return slowest, failure or RuntimeError("it failed on another worker")

        return measure

    def _completed(self, samples: Samples, calls: int, begin: float) -> WayCase:
        case, bound = self._case, self._contest.bound
        timed = [way.name for way in self._contest.ways if way.name in samples]
        first = self._contest.ways[0].name
        # A limit needs all of its parts, and a ratio the first way.
        is_complete = all(name in samples for name in (first, *_parts(bound)))
        limits = _limits(bound, samples) if bound is not None and is_complete else []
        ratios = times_faster(samples, first) if first in samples else {}
        rows = dict(self._rows)
        for name, own in samples.items():
            seconds = Quantity.measured([value / case.units for value in own], "s")
            bus = case.bus_bytes / seconds.value if case.bus_bytes else None
            rows[name] = msgspec.structs.replace(rows[name], seconds=seconds, bus_bytes_per_s=bus)
        for name in timed:
            rows[name] = msgspec.structs.replace(
                rows[name],
                times_faster=ratios.get(name),
                # Not strict: without a limit there are none.
                of_limit=_median([a / b for a, b in zip(limits, samples[name], strict=False)]),
                hidden=_hidden(bound, samples, name) if case.hides and is_complete else None,
            )
        middle = {name: statistics.median(own) for name, own in samples.items()}
        return WayCase(
            name=case.name,
            title=case.title,
            rows=tuple(rows.values()),
            unit=case.unit,
            calls=calls,
            turns=len(samples[timed[0]]) if timed else 0,
            limit=_limit(bound, limits, case.units),
            elapsed_s=time.perf_counter() - begin,
            notes=tuple(self._contest.explain(middle)) if is_complete else (),
        )


def _results(runner: WayRunner) -> Any:
    """What a way computes, when it has warmed up: caches, threads, worker processes."""
    if runner.results is not None:
        return runner.results()
    runner.run()
    return runner.run()


def observed(results: Any) -> list[Tensor]:
    """The results on the CPU, of large ones evenly spaced elements, in double precision.

    Cost: Waits for the devices.
    """
    synchronize()
    seen: list[Tensor] = []
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, (int, float)):
            seen.append(torch.tensor([float(leaf)], dtype=torch.float64))
        elif isinstance(leaf, Tensor):
            flat = leaf.detach().reshape(-1)
            # Of an empty result the stride would be 0, which slices refuse.
            stride = -(-flat.numel() // CHECKED_ELEMENTS) or 1
            # Copied, as the next way may write where this one's results are.
            seen.append(flat[::stride].to("cpu", torch.float64, copy=True))
    return seen


def difference(seen: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest between results, over the largest value of the result; `NO_NUMBER` where there is none.

    Raises:
        ValueError: there are more or fewer results.
    """
    gaps = [
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for a, b in zip(seen, wanted, strict=True)
        if b.numel()
    ]
    # `max` passes over NaN unless it comes first, and a result that is no number equals none.
    return max(map(known, gaps), default=0.0)


def known(gap: float) -> float:
    """A difference as a number that JSON has."""
    return gap if math.isfinite(gap) else NO_NUMBER


def _parts(bound: Bound | None) -> tuple[str, ...]:
    return tuple(bound.parts) if bound else ()


def _limits(bound: Bound, samples: Samples) -> list[float]:
    """The limit of every turn, from what the parts and ways took in the same turn."""
    turns = zip(*samples.values(), strict=True)
    return [bound.seconds(dict(zip(samples, turn, strict=True))) for turn in turns]


def _limit(bound: Bound | None, limits: list[float], units: int) -> LowerBound | None:
    if bound is None or not limits:
        return None
    return LowerBound(seconds=statistics.median(limits) / units, reason=bound.reason)


def _hidden(bound: Bound | None, samples: Samples, name: str) -> float | None:
    """Median over the turns, kept inside 0 and 1."""
    parts = _parts(bound)
    turns = zip(samples[name], *(samples[part] for part in parts), strict=True)
    shares = [hidden_share(dict(zip(parts, own, strict=True)), s) for s, *own in turns]
    middle = _median([share for share in shares if share is not None])
    return None if middle is None else min(1.0, max(0.0, middle))


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
