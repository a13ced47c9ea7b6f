"""Figures: every value is drawn where it belongs, and what people read follows from the data."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.machine import Setting
from ridgeline.reporting.charts import chart_timeline
from ridgeline.reporting.charts.chart_rates import collectives_figure, efficiency_figure
from ridgeline.reporting.charts.chart_timeline import MOST_DETAILS, timeline_figure
from ridgeline.reporting.charts.charts import memory_figure, smooth, training_figures
from ridgeline.reporting.labels import as_sentence
from ridgeline.reporting.operators import group_ops, short_name, times_from_timeline
from ridgeline.reporting.page.page_machine import machine_reading, machine_section, training_reading
from ridgeline.reporting.page.page_plan import plan_bars, plan_reading
from ridgeline.reporting.page.page_result import result_tiles, waterfall_bars, waterfall_reading
from ridgeline.reporting.page.page_step import (
    FrameTimes,
    frames_reading,
    memory_reading,
    roofline_reading,
    share_of_roof,
    timeline_reading,
    timeline_section,
)
from ridgeline.reporting.page.sections import bound_units
from ridgeline.reporting.report import report
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Span, Timeline

SETTING = Setting(device="cpu", workers=2, threads=1)


@pytest.fixture(scope="module")
def groups(workload, predicted):
    return group_ops(workload, times_from_timeline(workload, predicted))


def test_groups_keep_every_op_and_its_time(workload, predicted, groups) -> None:
    """Grouping by key loses no operator, no FLOP and no nanosecond of the prediction."""
    assert sum(group.count for group in groups) == len(workload.ops)
    assert sum(group.flops for group in groups) == workload.flops
    details = sum(span.duration_ns for span in predicted.spans if span.detail)
    assert sum(group.seconds for group in groups) == pytest.approx(details * 1e-9)
    assert [g.seconds for g in groups] == sorted((g.seconds for g in groups), reverse=True)


def test_the_simulator_tells_the_time_of_every_op(machine, workload) -> None:
    """Operator spans of a real prediction are found again by their index."""
    from ridgeline.plan import Plan

    timeline = simulate(machine, workload, Plan(workers=2, threads=1))
    assert set(times_from_timeline(workload, timeline)) == set(range(len(workload.ops)))


def test_short_names() -> None:
    """Operators are called as people call them."""
    assert short_name("aten.convolution.default") == "convolution"
    assert short_name("aten.add.Tensor") == "add.Tensor"
    assert short_name("mine::fused") == "mine.fused"


def test_every_frame_is_a_bar_at_its_time(predicted, measured) -> None:
    """Bars start and last as the spans do, and the measured ones lie below the predicted."""
    figure = timeline_figure([predicted, measured])
    bars = {
        (text, y): (base, x)
        for trace in figure["data"]
        for text, y, base, x in zip(
            trace["customdata"], trace["y"], trace["base"], trace["x"], strict=True
        )
    }
    assert len(bars) == len(predicted.spans) + len(measured.spans)
    rows = {}
    for name, timeline in (("predicted", predicted), ("measured", measured)):
        span = timeline.named("forward")
        found = [
            (y, bar)
            for (text, y), bar in bars.items()
            if text.startswith("<b>forward</b>") and bar[1] == span.duration_ns / 1e6
        ]
        assert [bar for _, bar in found] == [(span.start_ns / 1e6, span.duration_ns / 1e6)]
        rows[name] = found[0][0]
    assert rows["predicted"] < rows["measured"]


def test_only_the_longest_details_are_drawn(predicted, monkeypatch) -> None:
    """A step of very many operators is drawn with the longest of them, frames always."""
    monkeypatch.setattr(chart_timeline, "MOST_DETAILS", 10)
    figure = timeline_figure([predicted])
    assert sum(len(trace["x"]) for trace in figure["data"]) == len(predicted.frames) + 10


def test_what_is_not_drawn_is_counted_lane_by_lane() -> None:
    """Two devices with as many operators as are drawn of each: nothing is said to be left out."""
    spans = tuple(
        Span(name="op", lane="compute", index=device, start_ns=n, end_ns=n + 1, detail=True)
        for device in (0, 1)
        for n in range(MOST_DETAILS)
    )
    full = Timeline(origin="predicted", title="", workers=1, spans=spans, steps_ns=(MOST_DETAILS,))
    assert "are not drawn" not in str(timeline_section(full, None))
    more = msgspec.structs.replace(
        full, spans=(*spans, msgspec.structs.replace(spans[0], start_ns=7, end_ns=9))
    )
    assert "1 of the shortest operators are not drawn" in str(timeline_section(more, None))


def test_memory_stacks_to_the_live_bytes(workload) -> None:
    """At every operator the stacked categories add up to all live bytes."""
    figure = memory_figure(workload, 8 << 30)
    totals = [sum(values) for values in zip(*(t["y"] for t in figure["data"]), strict=True)]
    assert totals == pytest.approx([point.total_bytes / 2**20 for point in workload.memory])


def test_workspaces_are_stacked_on_live_bytes(workload) -> None:
    """Where they are known they are a band of their own, and the reading counts them."""
    spaces = [5 << 20] * len(workload.ops)
    figure = memory_figure(workload, 0, spaces)
    assert figure["data"][-1]["name"] == "Workspaces"
    totals = [sum(values) for values in zip(*(t["y"] for t in figure["data"]), strict=True)]
    assert totals == pytest.approx([5 + p.total_bytes / 2**20 for p in workload.memory])
    last = max(workload.memory, key=lambda point: point.op).op
    spaces[last] = 1 << 30
    assert memory_figure(workload, 0, spaces)["layout"]["yaxis"]["title"]["text"] == "GiB"
    assert memory_reading(workload, 8 << 30, spaces).startswith(
        "Live tensors and workspaces of one worker peak at 1."
    )
    assert "of it workspaces of operators; that is" in memory_reading(workload, 8 << 30, spaces)


def test_capacity_is_drawn_only_in_reach(workload) -> None:
    """A limit far above the peak would flatten the picture and is left to the sentence."""

    def capacities(limit: int) -> list[str]:
        notes = memory_figure(workload, limit)["layout"]["annotations"]
        return [n["text"] for n in notes if n["text"].startswith("capacity")]

    assert capacities(8 << 30) == []
    assert capacities(200 << 20) == ["capacity 200 MiB"]
    assert capacities(0) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_smoothing_stays_between_the_values(values: list[float]) -> None:
    """A smoothed curve never leaves the range of its values, and starts at the first."""
    smoothed = smooth(values)
    slack = 1e-6 * (1 + max(map(abs, values)))
    assert len(smoothed) == len(values)
    assert smoothed[0] == pytest.approx(values[0])
    assert min(values) - slack <= min(smoothed)
    assert max(smoothed) <= max(values) + slack


def test_training_figures_follow_what_is_known(history) -> None:
    """Without epochs there is no metric, without steps neither loss nor speed."""
    titles = [title for title, _ in training_figures(history)]
    assert titles == ["Loss by step", "Metric by epoch", "Samples per second"]
    assert [t for t, _ in training_figures(msgspec.structs.replace(history, epochs=()))] == [
        "Loss by step",
        "Samples per second",
    ]


def test_rates_are_bytes_over_seconds(machine) -> None:
    """The bandwidth drawn is the size over the measured time."""
    trace = collectives_figure(machine)["data"][0]
    point = machine.collectives[0].table[-1]
    assert trace["y"][-1] == point.num_bytes / point.seconds.value
    names = [t["name"] for t in efficiency_figure(machine, SETTING, "B/s")["data"]]
    assert names == ["elementwise float32", "memory float32"]


def test_waterfall_bars_touch_and_reach_the_step(verdict) -> None:
    """Each part starts where the last one ended, and the last ends at the measured step."""
    *parts, total = waterfall_bars(verdict)
    reached = 0.0
    for part in parts:
        assert part.start == pytest.approx(reached)
        reached += part.length
    assert reached == pytest.approx(1.0)
    assert total.length == 1.0


def test_plan_bars_say_only_what_differs(ranking) -> None:
    """The chosen plan is named in full, the others by their difference; the tried one has a tick."""
    rows = plan_bars(ranking.candidates)
    assert [row.name for row in rows] == [
        "2 workers x 1 thread, eager, buckets 6.00 MiB",
        "buckets 1.00 MiB",
        "buckets 25.0 MiB",
        "1 worker x 2 threads",
        "1 worker x 1 thread",
    ]
    assert [row.mark is not None for row in rows] == [True, False, False, False, False]
    assert rows[-1].share == "failed"
    assert max(row.length for row in rows) == 1.0


def test_readings_are_computed_from_the_data(
    machine, workload, ranking, predicted, measured, verdict, history, groups
) -> None:
    """The sentences under the headings state the numbers of this run."""
    assert timeline_reading(predicted) == (
        "The step is predicted to take 571 ms; of 107 ms of communication 95.1 % hides behind computing "
        "and 5.28 ms is exposed."
    )
    # Medians of a wait and of what is waited for need not be of one step.
    spans = tuple(
        msgspec.structs.replace(span, end_ns=span.start_ns + 150_000_000)
        if span.name == "wait"
        else span
        for span in predicted.spans
    )
    assert timeline_reading(msgspec.structs.replace(predicted, spans=spans)) == (
        "The step is predicted to take 571 ms; nothing of 107 ms of communication hides behind computing, and "
        "the step waits 42.9 ms longer than that."
    )
    assert memory_reading(workload, 8 << 30) == (
        "Live tensors of one worker peak at 150 MiB in the backward, 41.6 % of it activations; that is "
        "1.8 % of 8.00 GiB. What the allocator adds is not included."
    )
    planned = msgspec.structs.replace(predicted, counters={"peak_memory_bytes": 200.0 * (1 << 20)})
    assert memory_reading(workload, 0, (), planned).endswith(
        "% of it activations. By its plan a worker holds 200 MiB at most. What the allocator adds is not included."
    )
    assert plan_reading(ranking) == (
        "5 plans were simulated and 1 tried for real; the chosen one is 1.3 % ahead of the "
        "next (buckets 1.00 MiB) as predicted; predictions are assumed to be right within 5.0 %."
    )
    assert training_reading(history) == (
        "The loss went from 2.32 to 0.271 by step 790; after 4 epochs and 87.2 s of training the metric "
        "is 91.5 % (highest 91.5 %)."
    )
    assert machine_reading(machine, SETTING) == (
        "9 of 10 numbers were measured on this machine; each worker reaches at most 159 GFLOP/s "
        "(matmul, bfloat16) while 2 workers of 1 thread run."
    )
    assert roofline_reading(machine, SETTING, groups).startswith(
        "In float32 the processor limits above 6.49 FLOP per byte, below it memory does. "
    )
    hurried = [msgspec.structs.replace(group, seconds=1e-6 * group.seconds) for group in groups]
    assert "so the roof is too low" in roofline_reading(machine, SETTING, hurried)
    assert "so the roof is too low" not in roofline_reading(machine, SETTING, groups)
    largest = waterfall_reading(verdict)
    assert "; the largest loss is " in largest
    assert frames_reading([FrameTimes("a", 1.0, 1.1), FrameTimes("b", 1.0, 2.0)], 4.0, 0.15) == (
        "1 of 2 frames are within 15.0 % of what was predicted; the largest difference is in b, 1.00 s "
        "longer than predicted (25.0 % of the step)."
    )


def test_what_a_trial_corrected_is_called_expected(tmp_path, predicted, measured) -> None:
    """In the figure, the table and its sentence, where the page sets it apart from the prediction."""
    page = report(tmp_path / "r.html", predicted=predicted, expected=measured, measured=measured)
    text = page.read_text().replace("\u00a0", " ")
    assert ">Expected and measured time by frame<" in text
    assert "frames are within 15.0 % of what was expected; the largest" in text
    (title, _) = timeline_figure([predicted, measured], "expected")["layout"]["annotations"]
    assert title["text"].startswith("<b>Expected</b>")


def test_tiles_state_error_spread_and_overhead(verdict, predicted, measured, workload) -> None:
    """The numbers below the verdict come from the run; what is unknown has no tile."""
    tiles = {name: value for name, value, _ in result_tiles(verdict, predicted, measured, workload)}
    assert tiles["Prediction error"] == f"{100 * verdict.error:+.1f} %"
    assert tiles["Ridgeline's overhead"] == "61.0 us"
    assert tiles["Throughput"] == "422 /s"
    assert result_tiles(None, predicted, None, None) == []


def test_a_hidden_overhead_has_no_share_of_the_step(measured) -> None:
    """Where a run counts its host work as hidden behind the device, the tile says so."""
    assert result_tiles(None, None, measured, None)[-1][2].endswith("% of a step")
    counters = {**measured.counters, "hidden_overhead": 1.0}
    hidden = msgspec.structs.replace(measured, counters=counters)
    assert result_tiles(None, None, hidden, None)[-1] == (
        "Ridgeline's overhead", "61.0 us", "a step on the host, hidden behind the device",
    )  # fmt: skip


def test_numbers_stay_with_their_units() -> None:
    """No line breaks between a number and its unit; sentences start and end as sentences."""
    assert bound_units("5 ms or 3 % of 8.00 GiB in 2 steps") == (
        "5\u00a0ms or 3\u00a0% of 8.00\u00a0GiB in 2 steps"
    )
    assert as_sentence("a step takes 5 ms") == "A step takes 5 ms."
    assert as_sentence("") == ""


def test_intensity_and_rate_of_nothing_are_zero(groups) -> None:
    """Operators that move nothing or take no time have no infinite numbers."""
    empty = msgspec.structs.replace(groups[0], num_bytes=0, seconds=0.0)
    assert (empty.intensity, empty.rate) == (0.0, 0.0)
    assert math.isfinite(groups[0].rate)


def test_curves_are_read_at_their_best_and_ends(machine) -> None:
    """A curve may fall as well as rise with size; the sentence says what it does."""
    from ridgeline.machine import CurvePoint

    ceiling = msgspec.structs.replace(
        machine.ceilings[4],
        curve=tuple(
            CurvePoint(work=w, rate=r) for w, r in ((2**16, 1e10), (2**20, 2e10), (2**26, 5e9))
        ),
    )
    page = machine_section(msgspec.structs.replace(machine, ceilings=(ceiling,)), SETTING)
    assert bound_units(
        "While 2 workers of 1 thread run, memory in float32 is fastest at 1.00 MiB with 20.0 GB/s; "
        "it keeps 50.0 % at 64.0 KiB and 25.0 % at 64.0 MiB."
    ) in str(page)


def test_share_of_roof_is_one_on_the_roof(machine, groups) -> None:
    """Operators that run at the ceiling reach all of it; at half the rate, half of it."""
    top = machine.ceilings[0].rate.value
    seconds = 1e12 / top
    on_roof = msgspec.structs.replace(
        groups[0], flops=10**12, num_bytes=1000, seconds=seconds, dtype="float32"
    )
    slow = msgspec.structs.replace(on_roof, seconds=2 * seconds)
    assert share_of_roof(machine, SETTING, [on_roof]) == pytest.approx(1.0)
    assert share_of_roof(machine, SETTING, [slow]) == pytest.approx(0.5)
    assert share_of_roof(machine, SETTING, []) == 0.0
