"""Levers as text for the terminal: what faster parts of the machine would make of a step."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.reporting.terminal.text import bar, table, title
from ridgeline.simulator.curves.levers import Lever
from ridgeline.simulator.curves.what_if import FREE, MOST_FACTOR

LEAST_GAIN = 1.01
"""Gains below that are not worth a look."""


def levers_text(levers: Sequence[Lever]) -> RenderableType:
    """Each part twice as fast, the largest gain first, and which of them helps."""
    rows = table(("Faster", "Step", "As fast", "90 %", ""), right=(1, 2, 3))
    ordered = sorted(levers, key=lambda lever: -lever.gain)
    for lever in ordered:
        rows.add_row(
            lever_name(lever),
            units.seconds(lever.step_s),
            f"{lever.gain:.2f} x",
            f"{lever.low:.2f} .. {lever.high:.2f}",
            # Twice as fast is the most that a part twice as fast can make of a step.
            Text(bar((lever.gain - 1.0), 24), style="cyan"),
        )
    return Group(title("Levers", _reading(ordered)), rows)


def lever_name(lever: Lever) -> str:
    """The parts that are faster, and by how much."""
    return ", ".join(_faster(part, factor) for part, factor in lever.factors.items())


def gain_text(lever: Lever) -> str:
    """The gain with its interval."""
    return f"{lever.gain:.2f} x ({lever.low:.2f} to {lever.high:.2f})"


def _faster(part: str, factor: float) -> str:
    return f"{part} {FREE}" if factor == MOST_FACTOR else f"{part} {factor:g} x"


def _reading(ordered: Sequence[Lever]) -> str:
    # By the low end of its interval: a gain within the spread is none.
    helping = [" and ".join(lever.factors) for lever in ordered if lever.low > LEAST_GAIN]
    if not helping:
        return "no part alone helps by more than its spread"
    return f"{helping[0]} helps most" if len(helping) == 1 else f"{', then '.join(helping)} help"
