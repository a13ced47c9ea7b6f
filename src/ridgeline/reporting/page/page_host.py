"""What files cost and what a machine does to a training step, in the report's section on the machine."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.machine.storage import Storage
from ridgeline.reporting.effects.effects import Effect
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


def effect_tables(effects: Sequence[Effect]) -> Markup | None:
    """A table and a sentence for each effect that was measured; None without any."""
    boxes = [
        join(
            (
                tag("h3", effect.title),
                sentence(effect.reading),
                table(
                    effect.head,
                    effect.rows,
                    caption=effect.title,
                    numeric=range(1, len(effect.head)),
                )
                if effect.rows
                else "",
            )
        )
        for effect in effects
    ]
    return tag("div", *(tag("div", box) for box in boxes), class_="grid2") if boxes else None
