"""`Ranking`: the plans that were compared, best first, with reasons."""

import textwrap
from collections.abc import Iterator
from typing import ClassVar

from ridgeline import units
from ridgeline.codec import Noun, Value
from ridgeline.errors import PlanError
from ridgeline.plan import Choice, Plan
from ridgeline.planner.labels import label
from ridgeline.timeline import Timeline

_WIDTH = 80


class CompilerReading(Value, frozen=True, kw_only=True):
    """What the compiler made for a plan, or for one with the same program, and what had been assumed.

    Kernels are the compiler's own, without operators of libraries; `step_s` is what is predicted from them.
    """

    kernels: int
    num_bytes: int
    step_s: float
    assumed_kernels: int
    assumed_bytes: int
    assumed_s: float

    @property
    def text(self) -> str:
        """Both in one line."""
        return (
            f"the compiler made {self.kernels} kernels of its own that move "
            f"{units.num_bytes(self.num_bytes)}, where {self.assumed_kernels} and "
            f"{units.num_bytes(self.assumed_bytes)} were assumed: a step of {units.seconds(self.step_s)} "
            f"from what it made, {units.seconds(self.assumed_s)} as assumed"
        )


class Candidate(Value, frozen=True, kw_only=True):
    """A plan, what it is predicted to do, and, when it was tried, what it did.

    `why` says in a sentence why it stands where it stands. `failure` is the reason when a trial failed.
    `samples` are those of a step over all workers. `timeline` is the prediction before any trial;
    `corrected_s` is what is expected of a step after trials of relatives, and `kin_compile_s` of its
    preparation; `reading` what a trial read of its compiled program; None where it is unknown.
    """

    plan: Plan
    timeline: Timeline
    why: str
    measured: Timeline | None = None
    failure: str = ""
    samples: int = 1
    kin_compile_s: float | None = None
    corrected_s: float | None = None
    reading: CompilerReading | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step: measured when it was tried, else as corrected by trials, else predicted."""
        if self.measured is None and self.corrected_s is not None:
            return self.corrected_s
        return (self.measured or self.timeline).step_ns * 1e-9

    @property
    def sample_s(self) -> float:
        """Seconds per sample, over all workers."""
        return self.step_s / max(self.samples, 1)

    @property
    def compile_s(self) -> float:
        """Seconds of preparing the first step (compiling, capturing): measured if tried, else expected."""
        if self.measured is not None and "compile_s" in self.measured.counters:
            return self.measured.counters["compile_s"]
        # Once a plan was tried itself, what its relatives took says nothing more.
        if self.measured is None and self.kin_compile_s is not None:
            return self.kin_compile_s
        return self.timeline.counters.get("compile_s", 0.0)

    def total_s(self, steps: int) -> float:
        """Seconds of a run of so many steps, preparation included."""
        return self.compile_s + steps * self.step_s

    def cost_s(self, steps: int | None) -> float:
        """Seconds per sample, with its share of the preparation when the steps are known: ranked by this."""
        # Without a number of steps there is nothing to spread the preparation over.
        if steps is None:
            return self.sample_s
        return self.total_s(steps) / (steps * max(self.samples, 1))

    def least_share(self, computing: float, exchanging: float) -> float:
        """What share of the expected step is left where these shares of its computing and exchanging are.

        A plan that computes otherwise may be faster, by how much is in doubt. Its collectives are not: they
        send the same bytes over the same link, and over a slow one they are the step.

        Source: collectives that follow each other without a gap, on one lane, with nothing but computing
            before the first and behind the last.
        """
        timeline = self.timeline
        spans = timeline.lane("communication")
        # Without collectives nothing bounds the step from below.
        if not spans or not timeline.step_ns:
            return 0.0
        begin = min(span.start_ns for span in spans)
        window_ns = max(span.end_ns for span in spans) - begin
        around_ns = max(0, timeline.step_ns - window_ns)
        busy_ns = timeline.busy_ns("communication")
        return (exchanging * busy_ns + computing * around_ns) / timeline.step_ns


def ratio(mine: Candidate, other: Candidate) -> float:
    """Time per sample over the other's: measured or corrected by trials where both are, else predicted."""
    # Mixed, the error of the prediction would show as a difference between the plans.
    if all(c.measured is not None or c.corrected_s is not None for c in (mine, other)):
        return _ratio(mine.sample_s, other.sample_s)
    return _ratio(
        mine.timeline.step_ns / max(mine.samples, 1), other.timeline.step_ns / max(other.samples, 1)
    )


def _ratio(mine: float, other: float) -> float:
    return mine / other if other else 1.0


class Ranking(Noun, frozen=True, kw_only=True):
    """The plans that were compared, best first; made by `rl.choose()`.

    `error` is the fraction by which predictions may be off: the largest miss of the trials, at least what is
    assumed without any, and more where operators were not timed (then plans miss alike: smaller differences
    decide). Else differences below it decide nothing. With known `steps` the order is that of the
    whole run: preparing (compiling) plus all steps.
    """

    kind: ClassVar[str] = "ranking"

    candidates: tuple[Candidate, ...]
    error: float
    notes: tuple[str, ...] = ()
    steps: int | None = None

    @property
    def best(self) -> Candidate:
        """The chosen plan; its `plan.choices` say why every knob has its value."""
        return self.candidates[0]

    def choice(self, knob: str) -> Choice:
        """Why a knob of the chosen plan has its value.

        Raises:
            PlanError: there is no such knob.
        """
        for choice in self.best.plan.choices:
            if choice.knob == knob:
                return choice
        known = ", ".join(choice.knob for choice in self.best.plan.choices)
        raise PlanError(f"wanted a knob out of {known}, got {knob!r}; name one of them")

    def explain(self, knob: str) -> str:
        """A knob's value, who set it, why, and what other values would cost, as text; see `choice`."""
        choice = self.choice(knob)
        lines = [f"{choice.knob} = {choice.value} (set by {choice.origin})"]
        lines += textwrap.wrap(choice.reason, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        for other in choice.alternatives:
            how = "measured" if other.is_measured else "predicted"
            value = textwrap.shorten(other.value, 40, placeholder=" ...")
            lines.append(f"  {value}: {units.seconds(other.step_s)} a step, {how}")
        lines.append(f"  chosen: {units.nanoseconds(self.best.timeline.step_ns)} a step, predicted")
        if self.best.measured is not None:
            lines.append(f"  chosen: {units.seconds(self.best.step_s)} a step, measured")
        return "\n".join(lines)

    @property
    def text(self) -> str:
        """The ranking as a table for people, at most 80 columns wide where plans allow."""
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return self.text


def _lines(ranking: Ranking) -> Iterator[str]:
    yield f"{'':<3}{'plan':<47}{'predicted':>10}{'measured':>10}{'ratio':>8}"
    for number, candidate in enumerate(ranking.candidates, 1):
        words = textwrap.wrap(label(candidate.plan), 46)
        measured = "failed" if candidate.failure else ""
        if candidate.measured is not None:
            measured = units.nanoseconds(candidate.measured.step_ns)
        times = f"{units.digits3(ratio(candidate, ranking.best))} x"
        yield (
            f"{number:<3}{words[0]:<47}{units.nanoseconds(candidate.timeline.step_ns):>10}"
            f"{measured:>10}{times:>8}"
        )
        for line in words[1:]:
            yield f"   {line}"
    yield from textwrap.wrap(
        ranking.best.why, _WIDTH, initial_indent="why   ", subsequent_indent="      "
    )
    yield f"      predictions are assumed to be right within {units.percent(ranking.error)}"
    for note in ranking.notes:
        yield from textwrap.wrap(note, _WIDTH, initial_indent="note  ", subsequent_indent="      ")
