"""The table of all ways to exchange gradients, for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType

from ridgeline import units
from ridgeline.plan import Sync
from ridgeline.planner.exchanges.exchange_table import ExchangeRow
from ridgeline.reporting.terminal.text import table, title
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS, HELD, UNCOMPRESSED, words_of


def exchanges_text(rows: Sequence[ExchangeRow], heading: str) -> RenderableType:
    """What each way would send, what it and a step with it would take, and why it is taken or not.

    Args:
        rows: Of `exchange_table`.
        heading: The plan in whose place they stand, in a few words.
    """
    found = table(("Way", "Sent", "Exchange", "Step", "Exact", "Verdict"), right=(1, 2, 3))
    for row in rows:
        # What sets it apart names a way: its rhythm, else its codec, else its algorithm.
        way = ALGORITHMS[row.algorithm].label
        if row.compression != UNCOMPRESSED:
            way = COMPRESSIONS[row.compression].label
        if HELD.name in row.options:
            way = f"{way}, {row.options[HELD.name]} held"
        if row.every > 1:
            way = words_of(Sync(every=row.every, options=row.options))["interval"]
        found.add_row(
            way,
            "" if row.sent_bytes is None else units.num_bytes(row.sent_bytes),
            "" if row.exchange_s is None else units.seconds(row.exchange_s),
            "" if row.step_s is None else units.seconds(row.step_s),
            "yes" if row.is_exact else "no",
            row.verdict,
            style="bold" if row.verdict.startswith("chosen") else None,
        )
    return Group(title("Exchanging gradients", heading), found)
