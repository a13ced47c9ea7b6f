"""The plans that were ranked, why each knob stands, and ways to exchange gradients, as tables."""

from collections.abc import Iterable, Sequence

from ridgeline import units
from ridgeline.plan import Choice, Sync
from ridgeline.planner import Candidate
from ridgeline.planner.exchanges.exchange_table import ExchangeRow
from ridgeline.planner.labels import label
from ridgeline.reporting.grid import Grid
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS, HELD, UNCOMPRESSED, words_of

MOST_PLANS = 12
"""Plans that are shown; the saved ranking has all."""


def plans_grid(candidates: Sequence[Candidate]) -> Grid:
    """Plans as they are ranked, with predicted and measured time and the reason for each."""
    rows = tuple(
        (
            str(number),
            label(candidate.plan),
            units.nanoseconds(candidate.timeline.step_ns),
            _measured(candidate),
            "yes" if candidate.plan.exact else "no",
            candidate.why,
        )
        for number, candidate in enumerate(candidates[:MOST_PLANS], start=1)
    )
    head = ("", "Plan", "Predicted", "Measured", "Exact", "Why")
    return Grid("Plans", head, rows, right=(0, 2, 3), chosen=0)


def _measured(candidate: Candidate) -> str:
    # A trial that failed has no time, or one of steps before it did.
    if candidate.failure:
        return "failed"
    return "" if candidate.measured is None else units.nanoseconds(candidate.measured.step_ns)


def knobs_grid(choices: Iterable[Choice], title: str) -> Grid:
    """Every knob with its value, who set it, why, and what others would cost."""
    rows = tuple(
        (
            choice.knob,
            choice.value,
            choice.origin,
            choice.reason,
            "\n".join(
                f"{other.value}: {units.seconds(other.step_s)}{' measured' if other.is_measured else ''}"
                for other in choice.alternatives
            ),
        )
        for choice in choices
    )
    return Grid(title, ("Knob", "Value", "Set by", "Why", "Instead"), rows, right=())


def exchanges_grid(rows: Sequence[ExchangeRow]) -> Grid:
    """What each way would send, what it and a step with it would take, and why it is taken or not."""
    shown = tuple(
        (
            _way(row),
            "" if row.sent_bytes is None else units.num_bytes(row.sent_bytes),
            "" if row.exchange_s is None else units.seconds(row.exchange_s),
            "" if row.step_s is None else units.seconds(row.step_s),
            "yes" if row.is_exact else "no",
            row.verdict,
        )
        for row in rows
    )
    head = ("Way", "Sent", "Exchange", "Step", "Exact", "Verdict")
    taken = (number for number, row in enumerate(rows) if row.verdict.startswith("chosen"))
    return Grid("Exchanging gradients", head, shown, right=(1, 2, 3), chosen=next(taken, None))


def _way(row: ExchangeRow) -> str:
    """What sets a way apart names it: its rhythm, else its codec, else its algorithm."""
    if row.every > 1:
        return words_of(Sync(every=row.every, options=row.options))["interval"]
    is_encoded = row.compression != UNCOMPRESSED
    way = COMPRESSIONS[row.compression].label if is_encoded else ALGORITHMS[row.algorithm].label
    return f"{way}, {row.options[HELD.name]} held" if HELD.name in row.options else way
