"""What a case is made of: the work, the ways to do it, and the parts that bound it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ridgeline.experiments.contests import nothing
from ridgeline.experiments.ways.result import WayKind


class WayRemarks(NamedTuple):
    """What a way says about itself after it has run; see `WayRow`."""

    notes: tuple[str, ...] = ()
    peak_bytes: int | None = None
    predicted_s: float | None = None
    wire_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class WayRunner:
    """A way that has been made, ready to do the work again and again.

    Attributes:
        run: Does the work once and returns its results, any nest of tensors and numbers; what it
            enqueued on GPUs may still be running.
        close: Ends threads and processes.
        results: Warms up, and returns what is compared; None: what a second run returns.
        units: How often a run does the work; figures are of once.
        remarks: What it says about itself.
        threads: For torch on the CPU while it runs; 0: those of the case.
        before_turn: Called on every worker before the runs of a turn, outside of what is timed.
        settle: Called after them, outside of what is timed: ends what the last run left for the next.
        after_turn: Called then, when every worker's runs have ended.
    """

    run: Callable[[], Any]
    close: Callable[[], None] = nothing
    results: Callable[[], Any] | None = None
    units: int = 1
    remarks: Callable[[], WayRemarks] = WayRemarks
    threads: int = 0
    before_turn: Callable[[], None] = nothing
    settle: Callable[[], None] = nothing
    after_turn: Callable[[], None] = nothing


class Way(NamedTuple):
    """A way to do the work.

    Attributes:
        name: Its name in the table.
        kind: One after the other, another's, or ours.
        make: Makes it.
        lacking: What it needs and this machine lacks; empty: nothing.
    """

    name: str
    kind: WayKind
    make: Callable[[], WayRunner]
    lacking: str = ""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A time that no way can go below, from parts of the work that are timed beside the ways.

    Attributes:
        parts: Name of a part to what does it alone.
        seconds: The limit of one run, from the seconds of every part and way in the same turn.
        reason: How it follows from them, in words.
    """

    parts: Mapping[str, Callable[[], Any]]
    seconds: Callable[[Mapping[str, float]], float]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The ways of a case over inputs that exist.

    Attributes:
        ways: The first is what all are compared with.
        bound: What no way can beat; None: unknown.
        explain: Lines about the figures, from seconds by way and part, when all are timed.
    """

    ways: Sequence[Way]
    bound: Bound | None = None
    explain: Callable[[Mapping[str, float]], Sequence[str]] = field(default=lambda seconds: ())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of work, not prepared yet.

    Attributes:
        name: What `--only` calls it.
        title: Sizes and settings.
        prepare: Makes inputs and ways.
        lacking: What it needs and this machine lacks; empty: nothing.
        threads: For torch on the CPU; 0: as many as there are.
        units: Units in a run, e.g. tasks: figures are per unit.
        unit: What a unit is.
        calls: Runs in a turn; 0: as many as fill a turn.
        hides: Whether the two parts of the bound are to run at the same time.
        weight: Share of the time limit.
        bus_bytes: What a unit sends over the slowest link, of collectives; 0 where not needed.
    """

    name: str
    title: str
    prepare: Callable[[], Contest]
    lacking: str = ""
    threads: int = 0
    units: int = 1
    unit: str = "run"
    calls: int = 0
    hides: bool = False
    weight: float = 1.0
    bus_bytes: float = 0.0


def longest(*parts: str) -> Callable[[Mapping[str, float]], float]:
    """The limit of parts that can run at the same time: the one that takes longest."""

    def seconds(middle: Mapping[str, float]) -> float:
        return max(middle[part] for part in parts)

    return seconds


def simply(run: Callable[[], Any], *, threads: int = 0) -> Callable[[], WayRunner]:
    """What makes a way that is nothing but a function."""
    # Made anew each time, since a way is closed after its case.
    return lambda: WayRunner(run=run, threads=threads)
