"""`ridgeline scaling`: the runs beside each other, laws through them, and what is refused."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from ridgeline import laws
from ridgeline.codec import decode
from ridgeline.timeline import Span, Timeline
from ridgeline.verdict.scaling_nouns import MeasuredScaling
from strategies import make_workload


def write_run(folder: Path, workers: int, step_s: float) -> str:
    """A finished run that shares a batch of 64, as far as this verb reads it."""
    make_workload(samples=64 // workers).save(folder / "workload.json")
    for origin, factor in (("measured", 1.0), ("predicted", 1.1)):
        step_ns = round(1e9 * step_s * factor)
        Timeline(
            origin=origin,
            title="toy",
            workers=workers,
            spans=(Span(name="step", lane="compute", start_ns=0, end_ns=step_ns),),
            steps_ns=(step_ns,)
            if origin == "predicted"
            else (step_ns * 99 // 100, step_ns, step_ns),
        ).save(folder / f"{origin}.json")
    return str(folder)


@pytest.fixture
def run_dirs(tmp_path: Path) -> list[str]:
    return [write_run(tmp_path / f"w{n}", n, 0.5 / laws.amdahl(0.9, n)) for n in (4, 1, 2)]


def test_runs_are_shown_by_their_workers(run, run_dirs) -> None:
    """Speed-ups, what they reveal, the predictions' errors, and both laws with intervals."""
    ran = run("scaling", *run_dirs, "--devices", "8,16")
    assert ran.status == 0, ran.err
    words = ran.out.split()
    assert "strong: the workers share one batch" in ran.out
    assert [word for word in words if word in ("1.00", "1.82", "3.08")] == ["1.00", "1.82", "3.08"]
    assert ran.out.count("+10.0 %") == 3
    assert "serial part 10.0 % (" in ran.out
    assert "8 workers" in ran.out
    assert "! laws say little about 8, 16 workers: they are fitted to 3 numbers" in " ".join(words)


def test_the_result_as_json_and_in_a_file(run, run_dirs, tmp_path) -> None:
    """One noun, the same in both."""
    path = tmp_path / "scaling.json"
    ran = run("scaling", *run_dirs, "--json", "-o", path)
    assert ran.err == f"written to {path}\n"
    found = decode(MeasuredScaling, ran.out.encode(), where="stdout")
    assert found == MeasuredScaling.load(path)
    assert [point.workers for point in found.points] == [1, 2, 4]


def test_what_is_no_finished_run_is_named(run, run_dirs, tmp_path) -> None:
    """With the file that it lacks; nothing is written."""
    (tmp_path / "w2" / "measured.json").unlink()
    ran = run("scaling", *run_dirs, "-o", tmp_path / "out.json")
    assert ran.status == 1
    assert ran.err == (
        f"ridgeline: wanted the directory of a finished run, got no measured.json in {tmp_path / 'w2'}; "
        "train there first, or name another\n"
    )
    assert not (tmp_path / "out.json").exists()


def test_numbers_of_workers_are_whole(run, run_dirs) -> None:
    """Anything else is wrong usage."""
    ran = run("scaling", *run_dirs, "--devices", "8,x")
    assert ran.status == 2
    assert "--devices" in ran.err
