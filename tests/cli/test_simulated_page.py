"""`ridgeline simulate --report`: the page of a curve, that of a step, and paths that cannot be written."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "reporting"))

from test_report import read

from ridgeline.cli.curves import scaling_curve
from ridgeline.codec import decode
from ridgeline.verdict.predicted_scaling import PredictedScaling


def held(path: Path) -> PredictedScaling:
    text = read(path).scripts["noun-predicted_scaling"]
    return decode(PredictedScaling, text.encode(), where="page")


def test_the_page_of_a_curve(run, task_file, machine_file, tmp_path) -> None:
    """What is printed is drawn: the same points, the what-if, and the part that helps most beside."""
    path = tmp_path / "new" / "curve.html"
    words = ("simulate", task_file, "--machine", machine_file, "--cluster", "2:1gbit:20us")
    words += ("--scaling", "weak", "--devices", "1,2,...,32")
    ran = run(*words, "--what-if", "compute=2x", "--report", path, "--json")
    assert ran.status == 0
    assert ran.err.endswith(f"written to {path}\n")
    page, value = held(path), json.loads(ran.out)
    assert [p.samples_per_s for p in page.points] == [p["samples_per_s"] for p in value["scaling"]]
    assert [other.question for other in page.others] == ["compute=2x", "communication 2 x"]
    asked, helping = page.others
    assert [p.step_s for p in asked.points] == [p["step_s"] for p in value["what_if"]]
    best = max(page.levers, key=lambda lever: lever.gain)
    assert helping.points[-1].step_s == pytest.approx(best.step_s)
    assert (page.regime, page.samples) == ("weak", 8)
    assert [law.name for law in page.laws] == ["gustafson", "usl"]
    assert [level.size for level in page.cluster] == [2]
    assert read(path).sections == ["predicted-scaling", "machine", "data"]


def test_the_page_of_a_step(run, task_file, machine_file, tmp_path) -> None:
    """Of one number of workers: its timeline and operators, then the curve up to it."""
    path = tmp_path / "step.html"
    words = ("simulate", task_file, "--machine", machine_file, "--devices", "2", "-q")
    assert run(*words, "--what-if", "launch=2x", "--report", path).status == 0
    sections = read(path).sections
    assert sections[:2] == ["verdict", "timeline"]
    assert "predicted-scaling" in sections
    page = held(path)
    assert ([point.workers for point in page.points], page.samples) == ([1, 2], 8)
    assert page.levers
    (asked,) = page.others
    assert asked.question == "launch=2x"
    assert all(a.step_s < p.step_s for a, p in zip(asked.points, page.points, strict=True))


def test_a_path_that_cannot_be_written_is_refused_first(
    run, task_file, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is traced or measured, as wrong usage."""
    monkeypatch.setattr(scaling_curve, "load", lambda args: pytest.fail("the task was loaded"))
    ran = run("simulate", task_file, "--devices", "1,2", "--report", tmp_path)
    assert ran.status == 2
    assert f"wanted a file to write, got the directory {tmp_path}; name a file in it" in ran.err
