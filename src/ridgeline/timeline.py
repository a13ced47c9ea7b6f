"""`Timeline`: when what ran on which lane. Predicted and measured steps share this one type.

Times are integer nanoseconds from the start of the step, so that order and equality are exact.

Span names are the contract between the simulator and the runtime, see `ridgeline.simulator.frames`.
"""

import statistics
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self, get_args

from msgspec import Meta, structs

from ridgeline import units
from ridgeline.codec import Noun, Value
from ridgeline.compiled_program import CompilerProgram
from ridgeline.errors import LawError

Lane = Literal["host", "compute", "copy-in", "copy-out", "communication", "loader", "disk"]
LANES: tuple[Lane, ...] = get_args(Lane)


# Checked where a file is read and not where a value is made: a simulation makes thousands of spans.
Nanoseconds = Annotated[int, Meta(ge=0)]


class Span(Value, frozen=True, kw_only=True):
    """One thing that ran on one lane. `detail` marks operators inside a frame.

    `index` distinguishes lanes of one kind: which device, or which thread.

    `attributes` carry what is known about it (`flops`, `bytes`, `bound`, `source`, ...).
    """

    name: str
    lane: Lane
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    detail: bool = False
    index: int = 0
    attributes: dict[str, str | float | int] = {}

    @property
    def duration_ns(self) -> int:
        """End minus start."""
        return self.end_ns - self.start_ns

    def moved(self, by_ns: int) -> Self:
        """The same, so much later; what an earlier one would have before 0 is cut off."""
        start_ns, end_ns = self.start_ns + by_ns, self.end_ns + by_ns
        return structs.replace(self, start_ns=max(0, start_ns), end_ns=max(0, end_ns))


def lane_title(lane: Lane, index: int, indexes: Sequence[int]) -> str:
    """How one of several lanes of a kind is called in reports: `compute`, or `compute:1` of several."""
    return lane if tuple(indexes) == (0,) else f"{lane}:{index}"


def covered_ns(spans: Sequence[Span], end_ns: int | None = None) -> int:
    """Time during which at least one span runs; given an end, from 0 to that."""
    total, reached = 0, None if end_ns is None else 0
    # By start, so that all that is covered so far ends at one moment.
    for span in sorted(spans, key=lambda span: span.start_ns):
        start = span.start_ns if reached is None else max(span.start_ns, reached)
        end = span.end_ns if end_ns is None else min(span.end_ns, end_ns)
        total += max(0, end - start)
        reached = end if reached is None else max(reached, end)
    return total


class Timeline(Noun, frozen=True, kw_only=True):
    """One training step as spans on lanes; made by `rl.simulate()` or by a run.

    `steps_ns` are the durations of all steps that it stands for (one for a prediction); the spans
    are those of the step whose duration is the (lower) median.
    """

    kind: ClassVar[str] = "timeline"

    origin: Literal["predicted", "measured"]
    title: str
    workers: Annotated[int, Meta(ge=1)]
    spans: tuple[Span, ...]
    steps_ns: Annotated[tuple[Nanoseconds, ...], Meta(min_length=1)]
    notes: tuple[str, ...] = ()
    counters: dict[str, float] = {}
    """What a run counted: `overhead_ns` (Ridgeline's own time per step), fallbacks, ..."""
    programs: tuple[CompilerProgram, ...] = ()
    """What torch's compiler made, or took from its cache, for a trial that compiled."""

    def __post_init__(self) -> None:
        """Reject spans that end before they begin, by a `LawError`."""
        for span in self.spans:
            if span.end_ns < span.start_ns:
                raise LawError(
                    f"wanted a span that ends at {span.start_ns} ns or later, as it begins then, got "
                    f"{span.name!r} on {span.lane} with an end at {span.end_ns} ns; record the step again"
                )

    @property
    def step_ns(self) -> int:
        """Duration of the median step (lower median, so that it is one of the steps)."""
        return statistics.median_low(self.steps_ns)

    @property
    def frames(self) -> tuple[Span, ...]:
        """The spans that are not details, by start."""
        return tuple(
            sorted((s for s in self.spans if not s.detail), key=lambda s: (s.start_ns, s.end_ns))
        )

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        """The frames of one lane, by start."""
        return tuple(span for span in self.frames if span.lane == lane)

    def indexes(self, lane: Lane) -> tuple[int, ...]:
        """The indexes of the spans of one kind of lane, in order; (0,) where there is but one lane."""
        return tuple(sorted({span.index for span in self.spans if span.lane == lane})) or (0,)

    def busy_ns(self, lane: Lane) -> int:
        """Time during which at least one frame of the lane runs."""
        return covered_ns(self.lane(lane))

    def named(self, name: str) -> Span | None:
        """The first frame of this name, or None."""
        return next((span for span in self.frames if span.name == name), None)

    def total_ns(self, prefix: str) -> int:
        """Summed duration of the frames called `prefix` or `prefix/...`."""
        return sum(
            span.duration_ns
            for span in self.frames
            if span.name == prefix or span.name.startswith(f"{prefix}/")
        )

    def __repr__(self) -> str:
        lanes = ", ".join(
            f"{lane} {units.nanoseconds(self.busy_ns(lane))}" for lane in LANES if self.lane(lane)
        )
        return (
            f"Timeline({self.origin} {self.title}: step {units.nanoseconds(self.step_ns)} "
            f"over {len(self.steps_ns)} steps; busy: {lanes or 'nothing'})"
        )
