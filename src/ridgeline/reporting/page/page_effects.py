"""What a machine does to a training step, in the report's section on the machine."""

from collections.abc import Sequence

from ridgeline.reporting.effects.effects import Effect
from ridgeline.reporting.page.html import Markup, join, table, tag
from ridgeline.reporting.page.sections import sentence


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
