"""Recording what a step does: frames by host clock or by device events, resolved only when asked.

The recorder is on the hot path of every step, so it only appends stamps to a list.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from ridgeline.host.preemption import Preemptions
from ridgeline.recording.clocks import Clock, DeviceClock, Stamp
from ridgeline.recording.gaps import GapMeter, Gaps, StepGap, judge
from ridgeline.timeline import Lane, Span, Timeline

WINDOW = 200
"""Steps kept: enough for a median with quartiles, bounded in memory."""

DEVICE_SAMPLING = 8
"""On devices the frames of every eighth step only: an event costs the host microseconds."""

GROUP = 32
"""Brief steps that share an event at their end, after the first `SINGLE` of them. Source: measured beside an
H200, a step of 56 us on the device whose recording took the host 10 us, of which the event is 6, and another
at the begin of a group."""
SINGLE = 16
"""Brief steps that have an event each before that, enough for a trial."""


class StepRecord:
    """Raw stamps of one step: marks (a lane's frame begins) and closed spans; of a group, from its begin on.

    Attributes:
        num_steps: That have ended in it; more than 1 in a group of brief ones.
        gaps: Before each of its steps.
    """

    __slots__ = ("begin", "closed", "end", "gaps", "is_sampled", "is_warmup", "marks", "num_steps")

    def __init__(self, begin: Stamp) -> None:
        self.begin = begin
        self.end: Stamp = begin
        self.marks: list[tuple[str, Lane, Stamp]] = []
        self.closed: list[tuple[str, Lane, Stamp, Stamp]] = []
        self.is_warmup = False
        self.is_sampled = True
        self.num_steps = 0
        self.gaps: list[StepGap] = []


class Recorder:
    """Frames of the last steps; `timeline()` makes the measured `Timeline` of the median step.

    Attributes:
        frame: The frame that began last in the present step.
        listener: Called with a frame's name when it begins (for the black box), or None.
        costs: What steps cost besides, such as `overhead_ns`; the timeline has the medians, because a
            step in which another thread held the interpreter says nothing about the others. Of brief steps
            each group's first one adds to them.
        counts: How often something happened, such as `eager_steps`; the timeline has them as they are.
        begun_ns: When the host was called for the present step.
        is_brief: Steps are so short that an event after each would delay them: on a device they are recorded
            in groups, and each counts as the mean of its group.
    """

    def __init__(self, clock: Clock, *, starts: bool = True) -> None:
        self.clock = clock
        self.listener: Callable[[str], None] | None = None
        self.frame = ""
        self.costs: dict[str, deque[float]] = {}
        self.counts: dict[str, float] = {}
        self.overhead_ns = self.begun_ns = 0
        self.is_brief = False
        self._steps: deque[StepRecord] = deque(maxlen=WINDOW)
        self._frames: list[tuple[Span, ...]] = []
        self._is_on_device = isinstance(clock, DeviceClock)
        self._sampling = DEVICE_SAMPLING if self._is_on_device else 1
        self._group = GROUP if self._is_on_device else 1
        self._num_ended = 0
        self._gaps = GapMeter()
        self._preemptions = Preemptions()
        self.current = StepRecord(clock.stamp() if starts else 0)

    def begin_step(self, now_ns: int) -> None:
        """The next batch is there: `input` (since the last step's end) is over, at so many ns of the host."""
        self.overhead_ns, self.begun_ns = 0, now_ns
        self.frame = ""
        current = self.current
        if len(current.gaps) > current.num_steps:  # of a step that failed
            del current.gaps[current.num_steps :]
            # Its frames would be those of this step, too; those of a group are of steps that ended as well.
            if not current.num_steps:
                del current.marks[:], current.closed[:]
        current.gaps.append(self._gaps.begin(now_ns))
        if current.is_sampled and not current.num_steps:  # else it is one of a group that has begun
            current.marks += (("input", "host", current.begin), ("", "host", self.clock.stamp()))

    def _forget(self, record: StepRecord) -> None:
        # Its end is the begin of the step after it, which is still remembered.
        self.clock.recycle((record.begin, *(stamp for _, _, stamp in record.marks[1:])))
        self.clock.recycle(stamp for span in record.closed for stamp in span[2:])

    def count(self, name: str) -> None:
        """One more of what `name` says."""
        self.counts[name] = self.counts.get(name, 0.0) + 1

    def mark(self, name: str, lane: Lane = "compute") -> None:
        """Frame `name` begins on `lane` and ends the frame before it on that lane."""
        begin = time.perf_counter_ns()
        if self.current.is_sampled:
            self.current.marks.append((name, lane, self.clock.stamp()))
        self.frame = name
        if self.listener is not None:
            self.listener(name)
        self.overhead_ns += time.perf_counter_ns() - begin

    def end_step(self, *, is_warmup: bool = False) -> bool:
        """The step is over; a warm-up step is kept out of the timeline.

        Returns:
            Whether what it cost is to be added: of a group of brief steps the first one stands for all, which
            records no event.
        """
        record = self.current
        record.num_steps += 1
        record.is_warmup |= is_warmup
        self._num_ended += 1
        if self.is_brief and self._num_ended > SINGLE and record.num_steps < self._group:
            self._gaps.end(time.perf_counter_ns())
            return record.num_steps == 1 and not is_warmup
        self._close(record)
        self._gaps.end(time.perf_counter_ns())
        self.current.is_sampled = self._num_ended % self._sampling == 0
        return record.num_steps == 1 and not is_warmup

    def sample_next(self) -> None:
        """Have the frames of the coming step recorded, and then as often as ever."""
        # A group under way would take that step in: its frames, and itself where the group warms up.
        if self.current.num_steps:
            self._close(self.current)
        self._num_ended = 0
        self.current.is_sampled = True

    def _close(self, record: StepRecord) -> None:
        """Keep a record, whose end is the begin of the next one."""
        del record.gaps[record.num_steps :]  # of a step that failed
        record.end = stamp = self.clock.stamp()
        if self._is_on_device and len(self._steps) == WINDOW:
            self._forget(self._steps.popleft())
        self._steps.append(record)
        self.current = StepRecord(stamp)

    def add_cost(self, name: str, value: float) -> None:
        """What the step just ended cost."""
        values = self.costs.get(name)
        if values is None:  # `setdefault` would make a deque in every step
            values = self.costs[name] = deque(maxlen=WINDOW)
        values.append(value)

    def add_frames(self, spans: tuple[Span, ...]) -> None:
        """Keep the frames of one replay of a captured step, in ns from the begin of the replay."""
        self._frames.append(spans)

    @property
    def num_steps(self) -> int:
        """Recorded steps that are not warm-up."""
        return sum(record.num_steps for record in self._steps if not record.is_warmup)

    def timeline(self, title: str, workers: int, notes: Sequence[str] = ()) -> Timeline:
        """The measured timeline: spans of the median step, durations of all recorded steps.

        Cost: Waits for the device when it records by events.
        """
        records = [record for record in self._steps if not record.is_warmup] or list(self._steps)
        resolved, gaps = self._without_idle(
            [(self.clock.resolve((r.begin, r.end))[1], r) for r in records]
        )
        steps_ns = tuple(duration for duration, record in resolved for _ in record.gaps)
        if not resolved:
            return Timeline(
                origin="measured", title=title, workers=workers, spans=(), steps_ns=(0,)
            )
        return Timeline(
            origin="measured",
            title=title,
            workers=workers,
            spans=self._median_spans(resolved),
            steps_ns=steps_ns,
            notes=tuple(notes),
            counters=self.counts
            | {name: statistics.median(values) for name, values in self.costs.items()}
            # Workers of one host take cores from each other, which no count tells from other programs.
            | _counters(gaps, self._preemptions.per_s() if workers == 1 else None),
        )

    def _without_idle(
        self, steps: list[tuple[int, StepRecord]]
    ) -> tuple[list[tuple[int, StepRecord]], Gaps]:
        """The steps without what of the gaps before them is no part of them, and how much that is."""
        works = [
            max(0, duration - sum(gap.length_ns for gap in r.gaps)) // len(r.gaps)
            for duration, r in steps
            for _ in r.gaps
        ]
        gaps = judge([gap for _, r in steps for gap in r.gaps], works)
        cuts = iter(gaps.cuts_ns)
        cuts_ns = [sum(next(cuts) for _ in r.gaps) for _, r in steps]
        cut = [
            max(0, duration - self._cut(r, cut_ns)) // len(r.gaps)
            for (duration, r), cut_ns in zip(steps, cuts_ns, strict=True)
        ]
        # How long the device had nothing to do is known of the sampled steps alone.
        unknown = [
            self._is_on_device and c > 0 and (not r.is_sampled or len(r.gaps) > 1)
            for (_, r), c in zip(steps, cuts_ns, strict=True)
        ]
        known = [duration for duration, u in zip(cut, unknown, strict=True) if not u]
        if known:
            usual = statistics.median_low(known)
            cut = [min(d, usual) if u else d for d, u in zip(cut, unknown, strict=True)]
        return [(d, r) for d, (_, r) in zip(cut, steps, strict=True)], gaps

    def _cut(self, record: StepRecord, cut_ns: int) -> int:
        """Nanoseconds at the begin of a recorded step that are left out of it."""
        if not self._is_on_device or not cut_ns:
            return cut_ns
        # The device waited for less than the host did, and worked for other steps meanwhile: it is measured
        # there.
        return self.clock.resolve((record.begin, record.marks[1][2]))[1] if record.is_sampled else 0

    def _median_spans(self, resolved: Sequence[tuple[int, StepRecord]]) -> tuple[Span, ...]:
        """Frames of the step with the (lower) median duration, of those whose frames are known."""
        ordered = sorted(resolved, key=lambda pair: pair[0])
        if self._frames:  # a replayed graph: the frames of a replay end where the step ends
            step_ns = ordered[(len(ordered) - 1) // 2][0]
            # Frames are of few replays, so the median of those stands for all.
            lengths = sorted(self._frames, key=lambda spans: max(s.end_ns for s in spans))
            frames = lengths[(len(lengths) - 1) // 2]
            wait = max(0, step_ns - max(span.end_ns for span in frames))
            begin = Span(name="input", lane="host", start_ns=0, end_ns=wait)
            return (begin, *(span.moved(wait) for span in frames))
        sampled = [
            (self.clock.resolve((record.begin, record.end))[1] - duration, record)
            for duration, record in ordered
            if record.is_sampled
        ]
        if not sampled:
            return ()
        cut_ns, record = sampled[(len(sampled) - 1) // 2]
        return tuple(span.moved(-cut_ns) for span in step_spans(record, self.clock))


def _counters(gaps: Gaps, preempted_per_s: float | None) -> dict[str, float]:
    """What the timeline says of the time between steps, and of cores that the process lost."""
    found: dict[str, float] = {}
    if preempted_per_s is not None:
        found["preempted_per_s"] = preempted_per_s
    if gaps.waited_ns is not None:
        found["waited_ns"] = gaps.waited_ns
    if gaps.num_idle:
        found |= {"idle_ns": gaps.idle_ns, "idle_gaps": gaps.num_idle}
    if gaps.others_ns:
        found["others_ns"] = gaps.others_ns
    return found


def step_spans(record: StepRecord, clock: Clock) -> tuple[Span, ...]:
    """The spans of one recorded step, in nanoseconds from its begin.

    A mark ends where the next mark of its lane begins, or where the step ends. On one lane work runs
    in order, so a closed span begins no earlier than the one before it ended.
    """
    stamps: list[Stamp] = [record.begin, record.end]
    stamps += [stamp for _, _, stamp in record.marks]
    for _, _, start, end in record.closed:
        stamps += [start, end]
    # Stamps of a graph stand beside its kernels, where one may come a moment before the first of them.
    times = [max(0, time_ns) for time_ns in clock.resolve(stamps)]
    step_end = times[1]
    marks = [(n, lane, t) for (n, lane, _), t in zip(record.marks, times[2:], strict=False)]
    spans = []
    for index, (name, lane, start) in enumerate(marks):
        end = next((t for _, other, t in marks[index + 1 :] if other == lane), step_end)
        # The mark without a name ends `input`, and is no frame itself.
        if name:
            spans.append(Span(name=name, lane=lane, start_ns=start, end_ns=max(start, end)))
    rest = times[2 + len(marks) :]
    reached: dict[Lane, int] = {}
    pairs = zip(rest[0::2], rest[1::2], strict=True)
    for (name, lane, _, _), (start, end) in zip(record.closed, pairs, strict=True):
        begin = max(start, reached.get(lane, start))
        reached[lane] = max(begin, end)
        spans.append(Span(name=name, lane=lane, start_ns=begin, end_ns=reached[lane]))
    return tuple(spans)
