"""One case with all its contenders: made one after the other, checked, then timed in turns."""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from ridgeline.experiments.contests import (
    FAILURES,
    Progress,
    dismiss,
    reason_of,
    release_memory,
    torch_threads,
)
from ridgeline.experiments.hybrid.calls import call_contenders
from ridgeline.experiments.hybrid.cases import HybridCase
from ridgeline.experiments.hybrid.check import Seen, begin, difference, observe
from ridgeline.experiments.hybrid.entrant import Contender, Entrant
from ridgeline.experiments.hybrid.limit import limit_of
from ridgeline.experiments.hybrid.result import BASE, PURPOSES, CaseResult, HybridRow, break_even
from ridgeline.experiments.hybrid.steps import step_contenders
from ridgeline.experiments.turns import Samples, times_faster
from ridgeline.experiments.ways.holding import Holding, attempted
from ridgeline.experiments.ways.result import LowerBound
from ridgeline.machine import Quantity
from ridgeline.probe.timing import synchronize, time_block
from ridgeline.recording.turns import calls_in

TURN_S = 0.1
"""What one turn of the eager contender takes."""
PREPARING = 0.8
"""Fraction of the time limit after which no further contender is made."""


class HybridContest(Holding[HybridRow, Entrant]):
    """Holds one case.

    Args:
        case: What is executed.
        contenders: Who takes part; those to be made first are first, and the first is eager.
        limit_s: What the case may take; the contender that is being made when it ends is waited for.
        progress: Takes lines about what happens now.
    """

    def __init__(
        self,
        case: HybridCase,
        contenders: Sequence[Contender],
        *,
        limit_s: float,
        progress: Progress,
    ) -> None:
        super().__init__(progress)
        self.case = case
        self.contenders = tuple(contenders)
        self._limit_s = limit_s
        self._begin = time.perf_counter()
        self._batches = case.batches()
        self._wanted: Seen | None = None
        self._first_compile_s: float | None = None
        self._notes: list[str] = []

    def hold(self) -> CaseResult:
        """Make, check and time the contenders; all of them are gone afterwards."""
        try:
            with (
                torch_threads(self.case.threads),
                torch.set_grad_enabled(self.case.purpose == "step"),
            ):
                # Empty for all of them, so that no earlier run has compiled for the first.
                with _own_cache(any(contender.compilations for contender in self.contenders)):
                    for contender in self.contenders:
                        self._rows[contender.name] = self._admit(contender)
                    samples, calls = self._time()
                # Behind the turns: counting FLOP takes one more step of the eager model.
                limit = self._limit()
        finally:
            self._close()
        return self._result(samples, calls, limit)

    def _admit(self, contender: Contender) -> HybridRow:
        """Make one contender and check it; its row, still without times."""
        row = HybridRow(name=contender.name, kind=contender.kind)
        reason = self._reason_to_skip(contender)
        if reason:
            return msgspec.structs.replace(row, status="skipped", reason=reason)
        self._progress(
            f"{self.case.model} {PURPOSES[self.case.purpose]}: preparing {contender.name}"
        )
        entrant: Entrant | None = None
        is_warm = not self.case.is_cold and self._first_compile_s is not None
        started = time.perf_counter()
        try:
            with _own_cache(bool(contender.compilations) and self.case.is_cold):
                entrant = contender.make(self.case, self._limit_s * PREPARING - self._elapsed_s())
                begin(self.case, entrant, self._batches)
                # What is only launched so far is not ready.
                synchronize()
                prepare_s = time.perf_counter() - started
                seen = observe(self.case, entrant, self._batches)
            # The first is the program as it is written, which all others are held against.
            self._wanted = self._wanted or seen
            gap = difference(self.case, seen, self._wanted)
        except FAILURES as error:
            if entrant is not None:
                dismiss(entrant.close)
            return self._failed(row, error)
        if contender.compilations and self._first_compile_s is None:
            self._first_compile_s = prepare_s
        # Only now: who fails its first calls takes no turn.
        self._made[contender.name] = entrant
        return msgspec.structs.replace(
            row,
            prepare_s=prepare_s,
            is_warm=contender.compilations > 0 and is_warm,
            difference=gap,
            overwrites=seen.overwrites,
        )

    def _reason_to_skip(self, contender: Contender) -> str:
        if self._wanted is None:
            return "" if contender.name == BASE else f"there is no {BASE} contender to compare with"
        room_s = self._limit_s * PREPARING - self._elapsed_s()
        once_s = self._first_compile_s or self.case.compile_s
        is_warm = self._first_compile_s is not None and not self.case.is_cold
        # One compilation with a warm cache takes little; a search also compiles what was not compiled before.
        expected_s = once_s * max(0, contender.compilations - is_warm)
        if expected_s <= room_s:
            return ""
        return f"no time left for it in the {self._limit_s:.0f} s of this case"

    def _time(self) -> tuple[Samples, int]:
        """Figures of everyone that runs, and how many calls make a turn."""
        if BASE not in self._made:
            return {}, 0
        self._progress(
            f"{self.case.model} {PURPOSES[self.case.purpose]}: timing {len(self._made)} contenders"
        )
        rivals = {name: self._repeated(entrant) for name, entrant in self._made.items()}
        # The least of three: one slow look would make turns of too few calls.
        once_s = min(time_block(rivals[BASE], 3) for _ in range(3))
        calls = self.case.calls or calls_in(TURN_S, once_s)
        # Of a few turns figures are rough, but of none there are none: a fifth is left for them.
        room_s = max(0.2 * self._limit_s, self._limit_s - self._elapsed_s())
        measures = {
            name: partial(attempted, partial(time_block, run, calls))
            for name, run in rivals.items()
        }
        return self._turns(measures, limit_s=room_s), calls

    def _fail(self, name: str, error: Exception) -> None:
        """What it closes (graphs, threads) is gone at once; the turns hold its model until all are over."""
        super()._fail(name, error)
        dismiss(self._made.pop(name).close)

    def _repeated(self, entrant: Entrant) -> Callable[[], Any]:
        """A call without arguments: inference of the first batch, or a step on the next."""
        run, first = entrant.run, self._batches[0]
        if self.case.purpose == "callable":
            return lambda: run(first)
        following = itertools.cycle(self._batches)
        return lambda: run(next(following))

    def _limit(self) -> LowerBound | None:
        base = self._made.get(BASE)
        if base is None:
            return None
        try:
            return limit_of(self.case, base, self._batches[0])
        except FAILURES as error:  # the figures stand without it
            self._notes.append(f"no limit, for counting FLOP failed: {reason_of(error)}")
            return None

    def _result(self, samples: Samples, calls: int, limit: LowerBound | None) -> CaseResult:
        peers = [c.name for c in self.contenders if c.kind == "peer" and c.name in samples]
        ratios = {peer: times_faster(samples, peer) for peer in peers}
        return CaseResult(
            model=self.case.model,
            purpose=self.case.purpose,
            title=self.case.title,
            rows=tuple(self._completed(row, samples, ratios) for row in self._rows.values()),
            calls=calls,
            turns=len(samples.get(BASE, ())),
            limit=limit,
            seconds=self._elapsed_s(),
            notes=tuple(self._notes),
        )

    def _completed(self, row: HybridRow, samples: Samples, ratios: dict[str, Any]) -> HybridRow:
        """The row with its times, and the calls that earn its preparation back."""
        if row.name not in samples or row.prepare_s is None:
            return row
        call_s, base_s = (Quantity.measured(samples[name], "s") for name in (row.name, BASE))
        # What a warm cache saved is counted, since a program by itself finds none.
        cost_s = max(row.prepare_s, (self._first_compile_s or 0.0) if row.is_warm else 0.0)
        base_cost_s = self._rows[BASE].prepare_s or 0.0
        faster = {peer: own[row.name] for peer, own in ratios.items()}
        # A gain within the noise is none, so there is nothing to earn back with.
        is_gain = faster[BASE].low > 1.0
        earned = break_even(cost_s, call_s.value, base_cost_s, base_s.value) if is_gain else None
        return msgspec.structs.replace(row, seconds=call_s, times_faster=faster, break_even=earned)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._begin

    def _close(self) -> None:
        """Release the contenders, their memory, and what the compiler keeps of them."""
        super()._close()
        # The compiler keeps its programs, and models with them, as long as the process lives.
        torch.compiler.reset()
        release_memory()


def contenders_of(case: HybridCase) -> list[Contender]:
    """All that take part in a case of this purpose, eager first."""
    return call_contenders(case) if case.purpose == "callable" else step_contenders(case)


def hold(
    case: HybridCase, *, limit_s: float, progress: Progress, names: Sequence[str] = ()
) -> CaseResult:
    """Hold a case with all contenders of its purpose, or with those named beside the eager one."""
    contenders = contenders_of(case)
    if names:
        contenders = [one for one in contenders if one.name in (BASE, *names)]
    return HybridContest(case, contenders, limit_s=limit_s, progress=progress).hold()


@contextlib.contextmanager
def _own_cache(wanted: bool) -> Iterator[None]:
    """An empty cache for the compiler, removed afterwards; what was loaded from it continues running."""
    if not wanted:
        yield
        return
    from torch._inductor.utils import fresh_cache

    # The folder removes itself; processes of the compiler may write into it until then.
    with (
        tempfile.TemporaryDirectory(
            prefix="ridgeline-bench-", ignore_cleanup_errors=True
        ) as folder,
        fresh_cache(dir=folder, delete=False),
    ):
        yield
