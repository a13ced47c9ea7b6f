"""A predicted curve as a page: band, laws, other machines and efficiency, and the sentence above them."""

import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from plotly_figures import taken_by_plotly
from test_report import read

from ridgeline import laws
from ridgeline.codec import decode
from ridgeline.machine.cluster import parse_cluster
from ridgeline.plan import Plan
from ridgeline.reporting.charts.chart_predicted_scaling import predicted_scaling_figure
from ridgeline.reporting.charts.chart_scaling import scaling_layout
from ridgeline.reporting.page.page_scaling import predicted_scaling_reading
from ridgeline.reporting.report import report
from ridgeline.simulator.curves.levers import Lever
from ridgeline.simulator.curves.scaling import ScalingPoint
from ridgeline.verdict.predicted_scaling import PredictedScaling, predicted_scaling
from strategies import make_machine

COUNTS = (1, 2, 4, 8, 16, 32)


def point(workers: int, parallel: float = 0.95, spread: float = 0.1) -> ScalingPoint:
    speedup = laws.amdahl(parallel, workers)
    step_s = 0.5 / speedup
    return ScalingPoint(
        workers=workers,
        step_s=step_s,
        samples_per_s=128.0 * speedup,
        speedup=speedup,
        efficiency=speedup / workers,
        low_s=step_s * (1.0 - spread) if spread else None,
        high_s=step_s * (1.0 + spread) if spread else None,
        notes=("all <b> assumed",),
    )


def lever(part: str, gain: float, low: float) -> Lever:
    return Lever(factors={part: 2.0}, step_s=0.1, gain=gain, low=low, high=gain + 0.1)


LEVERS = (lever("compute", 1.1, 1.05), lever("communication", 1.5, 1.4))


def make(counts=COUNTS, levers=LEVERS, spread: float = 0.1) -> PredictedScaling:
    machine = msgspec.structs.replace(make_machine(), cluster=parse_cluster("2:10gbit:5us"))
    return predicted_scaling(
        "toy <b>",
        "strong",
        64,
        machine,
        Plan(workers=2),
        [point(n, spread=spread) for n in counts],
        others={"links=2x": [point(n, 0.99, spread=0.0) for n in counts]},
        levers=levers,
    )


@pytest.fixture(scope="module")
def found() -> PredictedScaling:
    return make()


def drawn(scaling: PredictedScaling) -> dict[str, dict]:
    return {one["name"]: one for one in predicted_scaling_figure(scaling)["data"] if "name" in one}


def test_everything_is_drawn_where_it_belongs(found) -> None:
    """Points, ideal line, laws and what-ifs on the left axis; efficiency on the right one."""
    lines = drawn(found)
    rates = [128.0 * laws.amdahl(0.95, n) for n in COUNTS]
    assert lines["predicted"]["x"] == list(COUNTS)
    assert lines["predicted"]["y"] == pytest.approx(rates)
    assert lines["no loss"]["y"][-1] == pytest.approx(32 * 128.0)
    assert lines["links=2x"]["y"] == pytest.approx([128.0 * laws.amdahl(0.99, n) for n in COUNTS])
    for name in ("amdahl", "usl"):
        assert (lines[name]["x"][0], lines[name]["x"][-1]) == (1, 32)
        assert lines[name]["y"][-1] == pytest.approx(rates[-1], rel=1e-5)
    right = lines["efficiency (right)"]
    assert right["yaxis"] == "y2"
    assert right["y"] == pytest.approx([laws.amdahl(0.95, n) / n for n in COUNTS])
    axis = predicted_scaling_figure(found)["layout"]["yaxis2"]
    assert (axis["side"], axis["overlaying"]) == ("right", "y")
    assert axis["tickvals"] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert [name for name, one in lines.items() if one.get("yaxis")] == ["efficiency (right)"]


def test_plotly_takes_the_figure(found) -> None:
    """Every property exists, every value fits."""
    assert len(taken_by_plotly(predicted_scaling_figure(found)).data) == 9


def test_the_band_is_between_slow_and_fast_machines(found) -> None:
    """A short step is a high rate; the area reaches from the line before."""
    data = predicted_scaling_figure(found)["data"]
    (number,) = (n for n, one in enumerate(data) if one.get("name") == "predicted, 90 %")
    slow, fast = data[number - 1], data[number]
    assert fast["fill"] == "tonexty"
    for below, above, rate in zip(
        slow["y"], fast["y"], drawn(found)["predicted"]["y"], strict=True
    ):
        assert (below, above) == pytest.approx((rate / 1.1, rate / 0.9))


def test_without_intervals_there_is_no_band_and_without_points_no_law() -> None:
    """Nothing is drawn that nobody computed; the page says why."""
    few = make(counts=(1, 2, 4), spread=0.0)
    assert set(drawn(few)) == {"no loss", "predicted", "links=2x", "efficiency (right)"}
    assert few.notes[0].startswith("no law is drawn: 3 numbers of workers are predicted")


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        (
            make(),
            (
                "32 workers are predicted to do 12.55 times the work of one (39.2 % each); efficiency falls "
                "below 80 % between 4 and 8 workers; at 32, communication 2 x helps most: the step is "
                "1.50 x (1.40 to 1.60) as fast."
            ),
        ),
        (
            make(counts=(1, 2), levers=(lever("compute", 1.02, 1.0),)),
            (
                "2 workers are predicted to do 1.90 times the work of one (95.2 % each); efficiency stays at "
                "80 % or more; at 2, no part of the machine alone helps by more than its spread."
            ),
        ),
        (
            make(counts=(1,), levers=(lever("memory", 1.5, 1.0), lever("launch", 1.2, 1.1))),
            (
                "1 worker: 128 samples/s are predicted; at 1, launch 2 x helps by more than its spread: the "
                "step is 1.20 x (1.10 to 1.30) as fast."
            ),
        ),
        (make(counts=(1,), levers=()), "1 worker: 128 samples/s are predicted."),
    ],
)
def test_the_sentence(scaling: PredictedScaling, sentence: str) -> None:
    """Efficiency at the most workers, where it falls off, and what helps there."""
    assert predicted_scaling_reading(scaling) == sentence


def test_a_peak_before_the_end_is_told() -> None:
    """Where more workers do less, the sentence says how many do the most."""
    points = [point(n) for n in COUNTS]
    points[-1] = msgspec.structs.replace(
        points[-1], samples_per_s=100.0, speedup=0.8, efficiency=0.025
    )
    reading = predicted_scaling_reading(msgspec.structs.replace(make(), points=tuple(points)))
    assert "; the most is done by 16 workers; " in reading


def test_the_page_holds_every_figure_and_assumption(found, tmp_path) -> None:
    """One section with figure, tables and facts, the noun to save, and names that stay text."""
    page = read(report(tmp_path / "r.html", predicted_scaling=found))
    assert page.sections == ["predicted-scaling", "data"]
    text = "\n".join(page.text)
    assert "toy <b>" in text
    assert "All <b> assumed." in text
    assert "ridgeline simulate --report makes the page again." in text
    for told in (
        "What if links=2x",
        "Levers at 32 workers",
        "strong: the workers share one batch",
        "64 samples a step, of all workers together",
        "rl.Plan(workers=2)",
        "2 behind 10.0 Gbit/s, 5.00 us",
        "test",
        "serial part 5.0\u00a0%",
        "limit 20.0 x",
    ):
        assert told.replace("\u00a0", " ") in text.replace("\u00a0", " ")
    # Each number of workers in both tables, and in both the samples that some of them have each.
    shares = [64 // n for n in COUNTS]
    assert [page.text.count(str(n)) for n in COUNTS] == [2 * (1 + (n in shares)) for n in COUNTS]
    assert "figure-predicted-scaling" in page.scripts
    held = page.scripts["noun-predicted_scaling"]
    assert decode(PredictedScaling, held.encode(), where="page") == found


def test_ticks_leave_each_other_room() -> None:
    """Of many numbers of workers those are named that do not overlap, the least and the most always."""
    ticks = scaling_layout(range(1, 65))["xaxis"]["tickvals"]
    assert (ticks[0], ticks[-1]) == (1, 64)
    assert len(ticks) <= 17
    assert all(after / before > 1.25 for before, after in pairwise(ticks))
    assert scaling_layout(COUNTS)["xaxis"]["tickvals"] == list(COUNTS)
