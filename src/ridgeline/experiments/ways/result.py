"""What such an experiment found: frozen values."""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, TypeVar

import msgspec

from ridgeline.codec import Noun, Value
from ridgeline.machine import Device, Host, Quantity

WayName = Literal["async", "parallel", "overlap", "allreduce", "sync", "kvstore"]
"""The experiments that are made of ways."""
WayKind = Literal["sequential", "peer", "ridgeline", "part"]
"""`part` is a piece of the work by itself (computing alone, copying alone): what the limit is made of."""
WAY_KINDS: tuple[WayKind, ...] = ("sequential", "peer", "ridgeline", "part")


Status = Literal["measured", "failed", "skipped"]


class LowerBound(Value, frozen=True, kw_only=True):
    """A time that nothing can go below, and how it was found."""

    seconds: float
    reason: str


class ContestRow(Value, frozen=True, kw_only=True):
    """What rows of all contests have.

    Attributes:
        name: Whose it is.
        status: `failed` and `skipped` have a reason and no figures.
        seconds: What it took.
        difference: Of the results, from those of the first.
        reason: Why there are no figures.
        notes: What it says about itself.
    """

    name: str
    status: Status = "measured"
    seconds: Quantity | None = None
    difference: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()


Row = TypeVar("Row", bound=ContestRow)


def fastest_of(rows: Iterable[Row]) -> Row | None:
    """The row with the least median, of equals the first; None without any."""
    timed = [(row.seconds.value, row) for row in rows if row.seconds is not None]
    # By the time alone: rows of one time have no order.
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


class WayRow(ContestRow, frozen=True, kw_only=True):
    """One way to do the work of a case.

    Attributes:
        name: Of the way (`way` in files), e.g. `concurrent.futures` or `ridgeline to_host`.
        kind: One thing after the other, another's way, ours, or a piece of the work.
        seconds: Of one unit of the case: a run, a task, a batch.
        times_faster: Than the case's first way, turn by turn.
        of_limit: LowerBound over seconds, turn by turn: 1.0 cannot be beaten; None for parts.
        difference: Largest, from the results of the first way, over their largest value.
        hidden: Share of the shorter part that ran while the longer one did: 1.0 hides all of it.
        peak_bytes: Most bytes of items that were alive at once, where the case counts them.
        predicted_s: Of one unit, before any was run.
        wire_bytes: That a worker's link carried away in a unit, headers included, where that can be counted.
        bus_bytes_per_s: Of collectives: their bandwidth as nccl-tests define it, which is that of the
            slowest link, whatever the number of workers.
    """

    name: str = msgspec.field(name="way")
    kind: WayKind
    times_faster: Quantity | None = None
    of_limit: float | None = None
    hidden: float | None = None
    peak_bytes: int | None = None
    predicted_s: float | None = None
    wire_bytes: int | None = None
    bus_bytes_per_s: float | None = None


class ContestCase(Value, frozen=True, kw_only=True):
    """What cases of all contests have.

    Attributes:
        title: Sizes and settings, for the heading.
        calls: Runs in a turn.
        turns: How many turns there were.
        limit: A time that nothing can go below, and how it was found; of what the rows' seconds are of.
        notes: What is to be known when reading it.
    """

    title: str
    calls: int = 0
    turns: int = 0
    limit: LowerBound | None = None
    notes: tuple[str, ...] = ()


class WayCase(ContestCase, frozen=True, kw_only=True):
    """One kind of work with all ways to do it; the first row is what the others are compared with.

    Attributes:
        name: What `--only` calls it.
        rows: The ways, then the parts.
        unit: What `seconds` are of.
        skipped: Why the case was not held here; then there are no rows.
        elapsed_s: What the case took in all.
    """

    name: str
    rows: tuple[WayRow, ...] = ()
    unit: str = "run"
    skipped: str = ""
    elapsed_s: float = 0.0

    def fastest(self, kind: WayKind) -> WayRow | None:
        """The way of a kind with the least median; None without any."""
        return fastest_of(row for row in self.rows if row.kind == kind)


class ContestExperiment(Noun, frozen=True, kw_only=True):
    """Where and how contests were held; `limit_s` is what they were to take in all."""

    host: Host
    devices: tuple[Device, ...]
    versions: dict[str, str]
    is_quick: bool
    limit_s: float


class WayExperiment(ContestExperiment, frozen=True, kw_only=True):
    """One of these experiments on one machine; saved as JSON."""

    kind: ClassVar[str] = "way-experiment"

    name: WayName
    cases: tuple[WayCase, ...]


def hidden_share(parts_s: Mapping[str, float], seconds: float) -> float | None:
    """How much of the shorter of two parts was hidden behind the longer; None unless there are two.

    Noise can bring it below 0 or above 1; a median over turns is kept inside when it is shown.

    Source: time = longer + (1 - hidden) x shorter, solved for `hidden`.
    """
    if len(parts_s) != 2 or min(parts_s.values()) <= 0.0:
        return None
    saved_s = sum(parts_s.values()) - seconds
    return saved_s / min(parts_s.values())
