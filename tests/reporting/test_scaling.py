"""Measured scaling as a page: dots where the runs are, curves that are the laws', all in strict JSON."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from test_report import read

from ridgeline import laws
from ridgeline.codec import decode
from ridgeline.reporting.charts.chart_scaling import scaling_figure
from ridgeline.reporting.page.page_scaling import scaling_reading
from ridgeline.reporting.report import report
from ridgeline.timeline import Span, Timeline
from ridgeline.verdict.scaling import scaling
from ridgeline.verdict.scaling_nouns import MeasuredRun, MeasuredScaling
from strategies import make_workload


def timeline(origin: str, workers: int, *steps_ns: int) -> Timeline:
    span = Span(name="step", lane="compute", start_ns=0, end_ns=steps_ns[0])
    return Timeline(
        origin=origin, title="toy <b>", workers=workers, spans=(span,), steps_ns=steps_ns
    )


@pytest.fixture(scope="module")
def found() -> MeasuredScaling:
    runs = []
    for n in (1, 2, 4):
        step = round(1e9 / laws.amdahl(0.9, n))
        measured = timeline("measured", n, step * 9 // 10, step, step * 11 // 10)
        predicted = timeline("predicted", n, step * 5 // 4) if n > 1 else None
        runs.append(MeasuredRun(f"w{n}", make_workload(samples=64 // n), measured, predicted))
    return scaling(runs, [8])


def test_dots_are_the_runs_and_curves_the_laws(found) -> None:
    """Measured and predicted rates by workers, quartiles as bars, and every law from the first to the last."""
    drawn = {one["name"]: one for one in scaling_figure(found)["data"]}
    measured = drawn["measured, quartiles"]
    assert measured["x"] == [1, 2, 4]
    assert measured["y"] == pytest.approx([64.0 * laws.amdahl(0.9, n) for n in (1, 2, 4)])
    ends = zip(measured["y"], measured["error_y"]["array"], found.points, strict=True)
    for rate, above, point in ends:
        assert rate + above == pytest.approx(rate * point.step_s / point.low_s)
    assert drawn["predicted"]["x"] == [2, 4]
    assert drawn["predicted"]["y"] == pytest.approx([rate / 1.25 for rate in measured["y"][1:]])
    for law in found.laws:
        curve = drawn[law.name]
        assert (curve["x"][0], curve["x"][-1]) == (1, 8)
        assert curve["y"][-1] == pytest.approx(law.points[0].samples_per_s.value, rel=1e-6)
    assert drawn["no loss"]["y"][-1] == pytest.approx(8 * 64.0)


def test_the_page_holds_the_runs(found, tmp_path) -> None:
    """One section with its sentence, the figure and the noun, and names that stay text."""
    page = read(report(tmp_path / "r.html", scaling=found))
    assert page.sections == ["scaling", "data"]
    text = "".join(page.text)
    assert "toy <b>" in text
    assert "ridgeline scaling --report makes the page again." in text
    assert f"{found.notes[-1]}." in text
    assert scaling_reading(found).startswith(
        "4 workers do 3.08 times the work of one (76.9 % each); strong: the workers share one batch. Amdahl's "
        "law: serial part 10.0 % ("
    )
    held = [
        text
        for text in page.scripts.values()
        if '"kind": "scaling"' in text or '"kind":"scaling"' in text
    ]
    (held_text,) = held
    assert decode(MeasuredScaling, held_text.encode(), where="page") == found
