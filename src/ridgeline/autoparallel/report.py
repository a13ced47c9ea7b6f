"""What `rl.parallelize` found: candidates, times, bounds, the choice and its reason."""

from typing import ClassVar

from ridgeline import units
from ridgeline.autoparallel.scheduling.makespan import Bounds
from ridgeline.callables.calls.report import aligned, counted
from ridgeline.codec import Noun, Value

AS_WRITTEN = "as written"
"""Name of the function itself among the candidates."""


class CandidateRow(Value, frozen=True, kw_only=True):
    """One way to run the program: lanes, syncs, predicted and measured seconds of a call (with quartiles).

    `difference` is the largest difference from the function as written, relative to the largest value of the
    result; None where it was not compared.
    """

    name: str
    lanes: int = 1
    syncs: int = 0
    predicted_s: float | None = None
    measured_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    difference: float | None = None
    note: str = ""


class ParallelReport(Noun, frozen=True, kw_only=True):
    """The outcome of `rl.parallelize`; `repr` is a small table.

    `serial_s` is the call one operation after the other, in its fastest measured form; `predicted_s` and
    `measured_s` are those of the chosen way. `counters` count the calls so far that ran as written
    (`other_shapes`, `changed`, `gradients`).
    """

    kind: ClassVar[str] = "parallel-report"

    subject: str
    device: str
    operations: int
    edges: int
    serial_s: float
    predicted_s: float | None
    measured_s: float
    bounds: Bounds
    lanes: int
    syncs: int
    chosen: str
    reason: str
    candidates: tuple[CandidateRow, ...]
    notes: tuple[str, ...] = ()
    counters: dict[str, int] = {}

    @property
    def speedup(self) -> float:
        """Serial seconds over those of the chosen way."""
        return self.serial_s / self.measured_s

    def row(self, name: str) -> CandidateRow | None:
        """The row of a candidate, or None."""
        return next((row for row in self.candidates if row.name == name), None)

    def __repr__(self) -> str:
        head = ("", "way", "lanes", "syncs", "predicted", "measured", "quartiles", "difference", "")
        size = f"{self.operations} operations, {self.edges} edges"
        lines = [f"ParallelReport({self.subject} on {self.device}: {size})"]
        lines += aligned([head, *(_cells(row, self.chosen) for row in self.candidates)])
        bounds = self.bounds
        lines.append(
            f"  no schedule is shorter than {units.seconds(bounds.limit_s)} (critical path "
            f"{units.seconds(bounds.critical_path_s)}, work {units.seconds(bounds.work_s)}, "
            f"links {units.seconds(bounds.link_s)})"
        )
        lines.append(f"  chosen: {self.chosen}: {self.reason}")
        lines += counted(self.counters)
        lines += [f"  ! {note}" for note in self.notes]
        return "\n".join(lines)


def _cells(row: CandidateRow, chosen: str) -> tuple[str, ...]:
    def time(value: float | None) -> str:
        return "" if value is None else units.seconds(value)

    quartiles = "" if row.low_s is None else f"{time(row.low_s)} .. {time(row.high_s)}"
    return (
        "*" if row.name == chosen else "",
        row.name,
        str(row.lanes),
        str(row.syncs),
        time(row.predicted_s),
        time(row.measured_s),
        quartiles,
        "" if row.difference is None else f"{row.difference:.1e}",
        row.note,
    )
