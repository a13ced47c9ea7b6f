"""The roofline: where dots, roofs and their names stand."""

import pytest
from sample_machine import SETTING

from ridgeline.reporting.charts.chart_roofline import placed, roofline_figure
from ridgeline.reporting.operators import group_ops, times_from_timeline


@pytest.fixture(scope="module")
def groups(workload, predicted):
    return group_ops(workload, times_from_timeline(workload, predicted))


def test_roofline_dots_stand_at_intensity_and_rate(machine, groups) -> None:
    """Each group that computes is one dot; its area is in proportion to its time."""
    figure = roofline_figure(machine, SETTING, groups)
    dots = [
        (x, y, size)
        for trace in figure["data"]
        if trace["mode"] == "markers"
        for x, y, size in zip(trace["x"], trace["y"], trace["marker"]["size"], strict=True)
    ]
    assert len(dots) == len(placed(groups))
    longest = max(placed(groups), key=lambda group: group.seconds)
    largest = max(dots, key=lambda dot: dot[2])
    assert largest[:2] == (longest.intensity, longest.rate)
    half = next(g for g in placed(groups) if g.seconds < longest.seconds / 1.5)
    sizes = {dot[:2]: dot[2] for dot in dots}
    ratio = (sizes[half.intensity, half.rate] / largest[2]) ** 2
    assert ratio == pytest.approx(half.seconds / longest.seconds)


def test_roofs_are_named_above_the_plot(machine, groups) -> None:
    """In one block with a row a roof, the highest first, so that no name is on another, a roof or a dot."""
    layout = roofline_figure(machine, SETTING, groups)["layout"]
    (names,) = layout["annotations"]
    rows = names["text"].split("<br>")
    assert rows[0] == "\u2504 matmul bfloat16 159 GFLOP/s"
    assert rows[-1].startswith("\u2571 memory ")
    assert (names["yref"], names["y"], names["yanchor"]) == ("paper", 1, "bottom")
    assert layout["margin"]["t"] >= 17 * len(rows)


def test_ticks_between_decades_are_whole_numbers(machine, groups) -> None:
    """Roofs lie within few decades: 50G is read at once, a 5 between 10G and 100G is not."""
    rates = roofline_figure(machine, SETTING, groups)["layout"]["yaxis"]
    assert (rates["dtick"], rates["tickformat"]) == ("D2", ".2~s")


def test_roofline_meets_at_the_ridge(machine, groups) -> None:
    """The memory slope ends where it reaches the highest ceiling."""
    slope = roofline_figure(machine, SETTING, groups)["data"][0]
    assert slope["y"][1] == pytest.approx(machine.ceilings[1].rate.value)
    assert slope["y"][1] / slope["x"][1] == pytest.approx(machine.ceilings[4].rate.value)
