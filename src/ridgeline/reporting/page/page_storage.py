"""The report's table of what reading and writing files costs."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.machine.storage import Storage
from ridgeline.reporting.page.html import Content, Markup, join, table, tag
from ridgeline.reporting.page.sections import as_sentence, sentence


def storage_tables(storage: Sequence[Storage]) -> Markup | None:
    """For each file system what its figures mean, and each of them with its quartiles; None without any."""
    if not storage:
        return None
    parts: list[Content] = [tag("h3", "Storage")]
    for one in storage:
        rows: list[tuple[Content, ...]] = [
            (
                access.name,
                units.seconds(access.seconds.value),
                f"{units.seconds(access.seconds.low)} to {units.seconds(access.seconds.high)}",
                units.quantity(access.rate.value, "B/s"),
                f"{units.quantity(access.rate.low, 'B/s')} to {units.quantity(access.rate.high, 'B/s')}",
                units.digits3(access.blocks_per_s),
                str(access.seconds.n),
            )
            for access in one.accesses
        ]
        head = ("", "Each takes", "Quartiles", "Rate", "Quartiles", "A second", "Samples")
        caption = f"Reading and writing in {one.folder}"
        parts.append(sentence(as_sentence(f"{one.place}; {one.meaning}")))
        parts.append(table(head, rows, caption=caption, numeric=range(1, 7)))
    return join(parts)
