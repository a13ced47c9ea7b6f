"""What `rl.hybridize` found: every mode, its times, its difference from eager, and why it was kept or not."""

from typing import ClassVar, Literal

from ridgeline import units
from ridgeline.codec import Noun, Value
from ridgeline.plan import Execution

Status = Literal["measured", "skipped", "refused", "different"]
"""`refused`: it cannot be captured or compiled. `different`: it gave other results than eager."""


class ModeRow(Value, frozen=True, kw_only=True):
    """One mode: seconds of a call (median and quartiles), seconds to compile, difference from eager.

    `difference` is the largest one met in the check, relative to the largest value of the result.
    `break_even` is the number of calls that earn the compile time back (None: never, or unknown).
    """

    mode: Execution
    status: Status
    call_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    compile_s: float = 0.0
    difference: float | None = None
    break_even: int | None = None
    reason: str = ""


class HybridReport(Noun, frozen=True, kw_only=True):
    """The outcome of `rl.hybridize`; `repr` is a table for people.

    `budget_s` bounds the search of `mode="auto"`. `counters` are those of the calls so far:
    `eager_calls` that did not fit the captured program, `shapes` captured, and `rebuilds` after
    parameters, modules, hooks or objects were replaced.
    """

    kind: ClassVar[str] = "hybrid-report"

    subject: str
    device: str
    chosen: Execution
    reason: str
    rows: tuple[ModeRow, ...]
    calls: int | None = None
    budget_s: float | None = None
    notes: tuple[str, ...] = ()
    counters: dict[str, int] = {}

    def row(self, mode: Execution) -> ModeRow | None:
        """The row of a mode, or None where it was not looked at."""
        return next((row for row in self.rows if row.mode == mode), None)

    def __repr__(self) -> str:
        budget = "" if self.budget_s is None else f", budget {units.seconds(self.budget_s)}"
        calls = "" if self.calls is None else f", {self.calls} calls"
        lines = [f"HybridReport({self.subject} on {self.device}{calls}{budget})"]
        lines += aligned([_HEAD, *(_cells(row, self.chosen) for row in self.rows)])
        lines.append(f"  chosen: {self.chosen}: {self.reason}")
        lines += counted(self.counters)
        lines += [f"  ! {note}" for note in self.notes]
        return "\n".join(lines)


_HEAD = ("", "mode", "call", "quartiles", "compile", "difference", "earned back", "why")


def _cells(row: ModeRow, chosen: Execution) -> tuple[str, ...]:
    quartiles = ""
    if row.low_s is not None and row.high_s is not None:
        quartiles = f"{units.seconds(row.low_s)} .. {units.seconds(row.high_s)}"
    return (
        "*" if row.mode == chosen else "",
        row.mode,
        row.status if row.call_s is None else units.seconds(row.call_s),
        quartiles,
        units.seconds(row.compile_s) if row.compile_s else "",
        "" if row.difference is None else f"{row.difference:.1e}",
        "" if row.break_even is None else f"{row.break_even} calls",
        row.reason,
    )


def counted(counters: dict[str, int]) -> list[str]:
    """A line of what happened since, how often; none where nothing did."""
    counts = ", ".join(f"{name} {count}" for name, count in counters.items() if count)
    return [f"  counted: {counts}"] if counts else []


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines, in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
