"""What reports say of steps that were compiled: one frame, fused kernels, and what preparing cost."""

import msgspec
import pytest

from chained_workloads import make_chain
from printed import as_text
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.labels import label
from ridgeline.planner.ranking import CompilerReading
from ridgeline.reporting.charts.chart_timeline import frame_colour, kind, timeline_figure
from ridgeline.reporting.operators import times_from_timeline
from ridgeline.reporting.page.page_plan import plan_bars, plan_reading, plan_section
from ridgeline.reporting.terminal.text_step import timeline_text
from ridgeline.simulator.step import simulate
from strategies import make_machine


def _ranking(steps: int | None, *, is_tried: bool = False) -> Ranking:
    machine = make_machine(device="cuda", dispatch_s=2e-2, graph_gap_s=1e-2)
    ranking = choose(machine, make_chain((4, 4), device="cuda", elements=1 << 10), steps=steps)
    if not is_tried:
        return ranking
    best = ranking.best
    measured = msgspec.structs.replace(
        best.timeline, origin="measured", counters={"compile_s": 31.0}
    )
    tried = msgspec.structs.replace(best, measured=measured)
    return msgspec.structs.replace(ranking, candidates=(tried, *ranking.candidates[1:]))


def test_one_program_is_drawn_as_one_frame() -> None:
    """The whole step has a letter, a colour and a name of its own in every chart."""
    timeline = simulate(make_machine(), make_chain((2, 2)), Plan(execution="step-graph"))
    assert kind("step") == "step"
    assert frame_colour("step") == "@forward"
    lines = as_text(timeline_text([timeline], 10)).splitlines()
    assert next(line for line in lines if "compute" in line).split()[-1] == "S" * 10
    assert "S step" in lines[-1]
    names = {trace["name"] for trace in timeline_figure([timeline])["data"]}
    assert "Whole step as one program" in names


def test_the_time_of_a_fused_kernel_is_shared_out() -> None:
    """Operators of one kernel share its time by the bytes that each would move; none is lost.

    Only the copy of the batch is none of an operator.
    """
    machine, workload = make_machine(device="cuda"), make_chain((3, 2), device="cuda")
    timeline = simulate(machine, workload, Plan(execution="compiled+graph"))
    times = times_from_timeline(workload, timeline)
    assert set(times) == set(range(len(workload.ops)))
    inside = [s for s in timeline.spans if s.detail and s.lane == "compute"]
    shown = sum(s.duration_ns for s in inside if {"op", "ops"} & s.attributes.keys())
    assert [s.name for s in inside if not {"op", "ops"} & s.attributes.keys()] == ["load batch"]
    assert sum(time.seconds for time in times.values()) == pytest.approx(shown * 1e-9)
    assert times[1].seconds == times[2].seconds == times[3].seconds
    assert times[1].bound == "memory"


def test_plans_tell_what_preparing_takes() -> None:
    """Bars carry the time of compiling as a remark, as it is in no step."""
    rows = {row.name: row for row in plan_bars(_ranking(None, is_tried=True).candidates)}
    assert rows["1 worker, step-graph"].share == "ran 126 ms, 31.0 s to prepare"
    assert rows["graph"].share == ""
    assert rows["compiled+graph"].share == "6.32 s to prepare"
    page = str(plan_section(_ranking(None)))
    assert "To prepare: compiling and capturing before the first step, not in the bar." in page


def test_the_reading_compares_whole_runs() -> None:
    """Where steps are known and something was compiled, the sentence compares whole runs."""
    assert plan_reading(_ranking(10)) == (
        "7 plans were simulated and none tried for real; the chosen one is 95.7 % ahead of the next (eager) as "
        "predicted; 4 are predicted faster and stand behind it for the time to prepare; predictions are assumed "
        "to be right within 75.0 %."
    )
    assert plan_reading(_ranking(100_000)) == (
        "7 plans were simulated and none tried for real; over 100000 steps, compiling included, the chosen "
        "one takes 12600 s and the next 16600 s."
    )


def test_what_the_compiler_made_stands_beside_the_plan() -> None:
    """For plans that were compiled and tried, in the words of the ranking's notes."""
    ranking = _ranking(None, is_tried=True)
    reading = CompilerReading(
        kernels=7,
        num_bytes=1 << 20,
        step_s=0.02,
        assumed_kernels=5,
        assumed_bytes=2 << 20,
        assumed_s=0.03,
    )
    tried, *others = (msgspec.structs.replace(c, reading=reading) for c in ranking.candidates)
    line = f"<li>{label(tried.plan)}: {reading.text}.</li>"
    page = plan_section(msgspec.structs.replace(ranking, candidates=(tried, *others)))
    assert page is not None
    assert page.count(line) == page.count("of its own that move") == 1
    assert "of its own that move" not in str(plan_section(ranking))
