"""Text for the terminal: plain when piped, complete, and true to the data."""

import io
import os

import msgspec
import pytest

from printed import as_text
from ridgeline.machine import Machine
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import numbers_grid
from ridgeline.reporting.operators import times_from_timeline
from ridgeline.reporting.page.sections import grid_table
from ridgeline.reporting.scaling_grids import points_grid
from ridgeline.reporting.terminal.fitted import bar
from ridgeline.reporting.terminal.text import (
    console,
    grid_text,
    machine_text,
    ranking_text,
    workload_text,
)
from ridgeline.reporting.terminal.text_step import (
    memory_text,
    timeline_text,
    verdict_text,
    waterfall_text,
)
from ridgeline.simulator.curves.scaling import ScalingPoint


def test_piped_output_has_no_control_characters(
    machine, workload, ranking, verdict, measured
) -> None:
    """A file gets the same columns without a single escape sequence."""
    buffer = io.StringIO()
    target = console(buffer)
    for part in (
        machine_text(machine),
        workload_text(workload),
        ranking_text(ranking),
        verdict_text(verdict),
        timeline_text([measured]),
    ):
        target.print(part)
    assert "\x1b" not in buffer.getvalue()
    assert "resnet18" in buffer.getvalue()


def test_terminals_without_unicode_show_question_marks() -> None:
    """Printing never fails for lack of characters."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console(stream).print("█ é")
    stream.flush()
    assert stream.buffer.getvalue() == b"? ?\n"


def test_machine_table_has_spread_and_source(machine) -> None:
    """Every number comes with its spread, its samples, and where it is from."""
    lines = as_text(machine_text(machine)).splitlines()
    row = next(line for line in lines if line.startswith("convolution float32"))
    assert row.split() == [
        "convolution", "float32", "2", "x", "1", "cpu", "threads",
        "48.0", "GFLOP/s", "3.0", "%", "9", "measured",
    ]  # fmt: skip
    assert next(line for line in lines if "optimizer dispatch" in line).split()[-1] == "assumed"
    assert next(line for line in lines if line.startswith(" 256 KiB")).split() == [
        "256", "KiB", "714", "us", "714", "us",
    ]  # fmt: skip
    assert "! clock frequency varied by 4 % during the probe" in lines


def test_numbers_say_how_they_repeat(machine) -> None:
    """In the terminal and on the page, where it is known: of a machine measured in several visits."""

    def row(shown: Machine) -> list[str]:
        lines = as_text(machine_text(shown)).splitlines()
        return next(line for line in lines if line.startswith("matmul float32")).split()

    (first, *others) = machine.ceilings
    assert "12.5" not in row(machine)
    rate = msgspec.structs.replace(
        first.rate, repeat_low=0.875 * first.rate.value, repeat_high=1.125 * first.rate.value
    )
    visited = msgspec.structs.replace(
        machine, ceilings=(msgspec.structs.replace(first, rate=rate), *others)
    )
    assert (first.family, first.dtype) == ("matmul", "float32")
    assert row(visited)[-5:] == ["%", "12.5", "%", "9", "measured"]
    page = str(grid_table(numbers_grid(visited)))
    assert "Repeats within" in page
    assert "12.5 %" in page
    assert "12.5 %" not in str(grid_table(numbers_grid(machine)))


def test_operator_table_needs_no_times(workload, predicted) -> None:
    """Without times the table is by FLOP; with them it says what bounds each operator."""
    bare = as_text(workload_text(workload))
    assert "Bound by" not in bare
    timed = as_text(workload_text(workload, times_from_timeline(workload, predicted)))
    first = next(line for line in timed.splitlines() if line.startswith("convolution_backward"))
    assert first.split()[-1] == "compute"
    assert "Operator time 552 ms; bound by: compute 95.7 %, memory 4.3 %" in timed


def test_ranking_shows_reasons_and_failures(ranking) -> None:
    """Plans come best first, with their reasons; a failed trial is called that."""
    text = as_text(ranking_text(ranking))
    rows = [line for line in text.splitlines() if "reason " in line]
    assert [line.split()[-1] for line in rows] == ["0", "1", "2", "3", "4"]
    assert "failed" in rows[4]
    assert "rl.Plan(workers=2, threads=1, sync=rl.Sync(bucket_bytes=(6291456,)))" in text
    assert "26214400: 589 ms measured" in text
    assert "! links were not measured" in text


def test_verdict_box_has_verdict_why_next(verdict) -> None:
    """The box says verdict, why and next, and both times with error and spread."""
    text = as_text(verdict_text(verdict))
    flat = " ".join(text.replace("│", " ").split())
    assert verdict.verdict in flat
    assert f"why {verdict.why}" in flat
    assert f"next {verdict.next}" in flat
    assert f"({100 * verdict.error:+.1f} %)" in flat


def test_waterfall_lists_every_part_once(verdict) -> None:
    """Each part has a row, the sum comes last."""
    lines = as_text(waterfall_text(verdict)).splitlines()
    names = [part.name for part in verdict.waterfall]
    rows = [line for line in lines if line.startswith(tuple(names))]
    assert len(rows) == len(names)
    assert lines[-1].startswith("step")
    assert lines[-1].rstrip().endswith("100.0 %")


def test_lanes_are_as_wide_as_the_step(predicted, measured) -> None:
    """The longest step fills the width; every lane is a row on the same scale."""
    lines = as_text(timeline_text([predicted, measured], width=50)).splitlines()
    rows = [line[15:] for line in lines if line.strip().startswith(("compute", "communication"))]
    assert len(rows) == 4
    assert {len(row.rstrip(" ")) for row in rows} == {50}
    assert rows[2].startswith("FFF")
    assert rows[2].rstrip().endswith("O")
    assert rows[0].rstrip().endswith(".")


def test_cells_are_shown_as_they_are() -> None:
    """What stands in brackets is a user's name, and no markup of rich's."""
    grid = Grid("Names", ("", "Where"), (("[bold]layer", "blocks[0]"),), reading="A [sentence].")
    text = as_text(grid_text(grid))
    for part in ("[bold]layer", "blocks[0]", "A [sentence]."):
        assert part in text


@pytest.mark.parametrize(
    ("fraction", "length"), [(0.0, 0), (0.001, 1), (0.5, 5), (1.0, 10), (3.0, 10)]
)
def test_bars_show_anything_that_is_there(fraction: float, length: int) -> None:
    """A bar has at least one character when there is anything, and never more than its width."""
    assert bar(fraction, 10) == "█" * length


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_bars_take_the_room_that_columns_leave(width: int) -> None:
    """A row with a bar is one line on a terminal of any width that holds its numbers."""
    rows = (("one", "1.00 ms"), ("two", "2.00 ms"))
    grid = Grid("Steps", ("What", "Takes a step of this long"), rows, bars=(0.5, 1.0))
    lines = as_text(grid_text(grid), width=width).splitlines()
    drawn = [line.count("█") for line in lines if line.startswith(("one", "two"))]
    assert len(lines) == 6  # a blank line, the heading, the head, a rule below it, and rows
    assert drawn[1] == min(24, width - len("What   Takes a step of this long   "))
    assert drawn[0] == max(1, round(drawn[1] / 2))


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_numbers_are_whole_on_any_terminal(width: int) -> None:
    """Where a table does not fit a row is a sentence: what is left of a number is another number."""
    head = ("Workers", "Samples each", "Step", "Samples/s", "")
    rows = (("1", "64.0", "8.12 ms", "7890", ""), ("2", "32.0", "548 us", "117000", "fast"))
    lines = as_text(grid_text(Grid("Scaling", head, rows, bars=(1.0, 1.0))), width=width)
    told = " ".join(lines.split())
    assert ("117000" in told, "7890" in told, "8.12 ms" in told) == (True, True, True)
    in_words = "Workers 2: Samples each 32.0, Step 548 us, Samples/s 117000, fast"
    assert (in_words in told) == (width < 60)


def test_lanes_take_the_room_that_their_names_leave(predicted) -> None:
    """On a narrow terminal a lane is one line as well."""
    lines = as_text(timeline_text([predicted]), width=80).splitlines()
    rows = [line for line in lines if line.strip().startswith(("compute", "communication"))]
    assert {len(row) for row in rows} == {80}


def test_bars_without_unicode_are_number_signs() -> None:
    """Where blocks cannot be written a bar still shows how long it is."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console(stream).print(grid_text(Grid("Steps", ("What",), (("one",),), bars=(0.5,))))
    stream.flush()
    assert b"one  | ############\n" in stream.buffer.getvalue()


def test_readers_that_went_away_are_no_end_of_the_process() -> None:
    """`ridgeline ... | head` is told by its own error, of which the command line makes an exit status."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True)
    with pytest.raises(BrokenPipeError):
        console(stream).print("a line")
    stream.close()


def test_scaling_lists_efficiency() -> None:
    """One row a number of workers, with speed-up and efficiency."""
    points = [
        ScalingPoint(
            workers=n, step_s=0.1, samples_per_s=100.0 * n, speedup=0.9 * n, efficiency=0.9
        )
        for n in (1, 2)
    ]
    rows = as_text(grid_text(points_grid(points, "Scaling"))).splitlines()
    assert rows[-1].split()[:9] == ["2", "10", "100", "ms", "200", "1.80", "x", "90.0", "%"]
    many = msgspec.structs.replace(points[1], samples_per_s=2 * 1437 / 0.3, step_s=0.3)
    assert points_grid([many], "Scaling").rows[0][1] == "1437"
    # Intervals have a column where they are known, and no empty one.
    assert "90 %" not in points_grid(points, "Scaling").head
    drawn = msgspec.structs.replace(points[1], low_s=0.09, high_s=0.12)
    grid = points_grid([points[0], drawn], "Scaling")
    assert grid.head[3] == "90 %"
    assert [row[3] for row in grid.rows] == ["", "90.0 ms .. 120 ms"]


def test_memory_says_what_it_is_held_for(predicted) -> None:
    """One line: the peak and its parts; a part that nobody measured says so."""
    sizes = {"parameter": 4, "gradient": 3, "state": 2, "activation": 1, "workspace": 5}
    counters = {f"peak_{name}_bytes": float(size << 20) for name, size in sizes.items()}
    told = msgspec.structs.replace(
        predicted, counters={**counters, "peak_memory_bytes": 15.0 * 2**20}
    )
    traced = (
        "Memory peak of a worker 15.0 MiB: parameters 4.00 MiB, gradients 3.00 MiB, optimizer state "
        "2.00 MiB, activations 1.00 MiB, workspaces of operators "
    )
    assert " ".join(as_text(memory_text(told)).split()) == f"{traced}5.00 MiB"
    del told.counters["peak_workspace_bytes"]
    assert " ".join(as_text(memory_text(told)).split()) == f"{traced}not measured"
