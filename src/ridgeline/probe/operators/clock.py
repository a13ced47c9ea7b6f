"""The clock of a replayed step: seconds of every op, or of whole stretches of ops without marks between."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ridgeline.probe.gpu import Ruler
from ridgeline.probe.operators.replay import ReplayWatch, WorkloadReplay

STRETCH = 256
"""Ops that are timed together where a whole pass is: few marks, and few enough for a GPU's queue."""


class Stretch(NamedTuple):
    """Seconds of the ops from `first` to before `end`, taken together."""

    first: int
    end: int
    seconds: float


@dataclass
class Passes:
    """What was timed: seconds by op, pass by pass; and the stretches of each whole pass."""

    ops: list[dict[int, float]] = field(default_factory=list)
    whole: list[list[Stretch]] = field(default_factory=list)


class ReplayClock:
    """Runs a replay and reads off seconds: the host's clock, or events on the GPU.

    Args:
        device: Where the replay runs.
        before: Called with the index of every op right before it, outside of its time.
        now_ns: The host's clock.

    Attributes:
        late: Seconds, by op, of those times that a GPU may have waited for the host; of ops that wait for
            the GPU themselves there are no others.
    """

    def __init__(
        self,
        device: torch.device,
        before: Callable[[int], None] | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._device = device
        self._before = before or (lambda index: None)
        self._now_ns = now_ns
        self._ruler = Ruler(device) if device.type == "cuda" else None
        self._overhead_ns: list[float] = []
        self._waiting: set[int] | None = None
        self.late: dict[int, list[float]] = defaultdict(list)

    def warm(
        self, replay: WorkloadReplay, wanted: Callable[[int], bool], *, is_first: bool
    ) -> None:
        """A pass that is not timed. The first waits for a GPU after each op: a fault there has a culprit."""
        settle = self._settle if is_first else None
        replay.run(wanted, lambda: None, ReplayWatch(before=self._before, settle=settle))
        self._settle()

    def _settle(self) -> None:
        if self._ruler is not None:
            torch.cuda.synchronize(self._device)

    def ops(self, replay: WorkloadReplay, wanted: Callable[[int], bool]) -> dict[int, float]:
        """Seconds of each op that was issued, by its index."""
        if self._ruler is not None:
            return self._on_gpu(replay, wanted, self._ruler)
        begin = self._now_ns()
        marks = replay.run(wanted, self._now_ns, ReplayWatch(before=self._before))
        # Whole nanoseconds until the end, as differences of large floats lose digits.
        taken_ns = {index: after - before for index, (before, after) in marks.items()}
        if marks and replay.ended_at is None:
            # What the replay itself takes between operators, which whole passes are relieved of.
            spent_ns = self._now_ns() - begin - sum(taken_ns.values())
            self._overhead_ns.append(spent_ns / len(marks))
        return {index: ns * 1e-9 for index, ns in taken_ns.items()}

    def _on_gpu(
        self, replay: WorkloadReplay, wanted: Callable[[int], bool], ruler: Ruler
    ) -> dict[int, float]:
        """Without ops at whose end the GPU may have waited for the host."""
        order: list[int] = []
        late: set[int] = set()

        def before(index: int) -> None:
            self._before(index)
            if ruler.pace() and order:
                # The one before: the GPU woke while that was being queued.
                late.add(order[-1])
            order.append(index)

        marks = replay.run(wanted, ruler.mark, ReplayWatch(before=before))
        torch.cuda.synchronize(self._device)
        ruler.restart()
        # An operator waits for the GPU if it does so in every pass; one that was late once met a slow host.
        self._waiting = late if self._waiting is None else self._waiting & late
        for index in late & set(marks):
            self.late[index].append(ruler.seconds(*marks[index]))
        return {index: ruler.seconds(*pair) for index, pair in marks.items() if index not in late}

    def issuing(self, replay: WorkloadReplay) -> dict[int, float]:
        """Host seconds of each op, by its index, while the GPU runs behind and its queue has room."""
        issued = itertools.count(1)

        def drain() -> None:
            # A full queue makes the host wait, which is no cost of issuing.
            if next(issued) % STRETCH == 0:
                torch.cuda.synchronize(self._device)

        marks = replay.run(
            lambda index: True, self._now_ns, ReplayWatch(before=self._before, pace=drain)
        )
        return {index: (after - before) * 1e-9 for index, (before, after) in marks.items()}

    def watch(
        self, replay: WorkloadReplay, wanted: Callable[[int], bool], around: Callable[..., Any]
    ) -> None:
        """A pass that is not timed, with something around every call; see `ReplayWatch.around`."""
        replay.run(wanted, lambda: None, ReplayWatch(before=self._before, around=around))
        self._settle()

    def whole(self, replay: WorkloadReplay) -> list[Stretch] | None:
        """Seconds of one pass, stretch by stretch; None where the clock could not follow.

        On the CPU what the replay itself costs is taken off, as found in the passes before.
        """
        if self._ruler is not None:
            return self._whole_on_gpu(replay, self._ruler)
        if not self._overhead_ns:
            return None
        firsts: list[tuple[int, int]] = []

        def before(index: int) -> None:
            self._before(index)
            if not firsts or index >= firsts[-1][0] + STRETCH:
                firsts.append((index, self._now_ns()))

        marks: dict[int, Any] = replay.run(
            lambda index: True, lambda: None, ReplayWatch(before=before)
        )
        firsts.append((max(marks, default=-1) + 1, self._now_ns()))
        # The median, since single passes are disturbed.
        overhead_ns = sorted(self._overhead_ns)[len(self._overhead_ns) // 2]
        stretches = []
        for (first, begin), (end, after) in pairwise(firsts):
            issued = sum(first <= index < end for index in marks)
            stretches.append(Stretch(first, end, (after - begin - issued * overhead_ns) * 1e-9))
        # Memory ran out: what follows was not issued.
        return stretches if replay.ended_at is None else None

    def _whole_on_gpu(self, replay: WorkloadReplay, ruler: Ruler) -> list[Stretch] | None:
        """A stretch also ends behind an op that waits for the GPU, which is awake then."""
        firsts: list[int] = []
        events: list[tuple[Any, Any]] = []
        begin: list[Any] = []
        last = -1
        was_late = False

        def close() -> None:
            if begin:
                events.append((begin.pop(), ruler.mark()))

        def before(index: int) -> None:
            nonlocal last, was_late
            self._before(index)
            has_waited = last in (self._waiting or ())
            last = index
            if not firsts or has_waited or index >= firsts[-1] + STRETCH:
                # Before the hold, whose waiting is no part of a stretch.
                close()
                was_awake = ruler.hold(is_slow=False if has_waited else None)
                was_late = was_late or (was_awake and not has_waited)
                firsts.append(index)
                begin.append(ruler.mark())

        marks = replay.run(lambda index: True, lambda: None, ReplayWatch(before=before))
        close()
        was_late = was_late or (ruler.is_awake() and last not in (self._waiting or ()))
        torch.cuda.synchronize(self._device)
        ruler.restart()
        if was_late or replay.ended_at is not None:
            return None
        ends = [*firsts[1:], max(marks, default=-1) + 1]
        return [
            Stretch(first, end, ruler.seconds(*pair))
            for first, end, pair in zip(firsts, ends, events, strict=True)
        ]
