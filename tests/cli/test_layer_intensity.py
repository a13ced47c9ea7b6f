"""`ridgeline simulate --intensity`: alone, beside a curve, and what is refused."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "reporting"))

from test_report import read

from ridgeline.cli.curves import layer_intensity


def test_the_layers_alone(run, task_file, machine_file, tmp_path) -> None:
    """Table, sentence and page; every layer of the task, split over as many workers as were asked for."""
    path = tmp_path / "layers.html"
    words = ("simulate", task_file, "--machine", machine_file, "--intensity", "--devices", "4")
    ran = run(*words, "--report", path)
    assert ran.status == 0
    assert ran.err.endswith(f"written to {path}\n")
    assert "Layers of tiny  4 workers, 8 samples together" in ran.out
    assert "The link of each of 4 workers carries" in " ".join(ran.out.split())
    assert "Scaling" not in ran.out
    value = json.loads(run(*words, "-q", "--json").out)
    assert set(value) == {"intensity"}
    layers = value["intensity"]["layers"]
    assert [one["layer"]["modules"] for one in layers] == [["0"], ["2"]]
    weights = 4 * (8 * 32 + 32)
    assert layers[0]["data_bytes"] == 2 * 3 / 4 * weights
    assert layers[0]["model_bytes"] == 3 / 4 * (4 * 8 * 32)
    assert layers[1]["model_bytes"] == 3 / 4 * (4 * 8 * 4) + 2 * 3 / 4 * (4 * 8 * 32)
    assert "intensity" in read(path).sections


def test_each_worker_with_its_own_batch(run, task_file, machine_file) -> None:
    """Then all together have more samples, which is more to send for a layer that is split."""
    words = (
        "simulate",
        task_file,
        "--machine",
        machine_file,
        "--intensity",
        "--devices",
        "4",
        "-q",
        "--json",
    )
    strong = json.loads(run(*words).out)["intensity"]
    weak = json.loads(run(*words, "--scaling", "weak").out)["intensity"]
    assert (strong["samples"], weak["samples"]) == (8, 32)
    for one, other in zip(strong["layers"], weak["layers"], strict=True):
        assert other["data_bytes"] == one["data_bytes"]
        assert other["model_bytes"] == 4 * one["model_bytes"]
        assert other["samples"] == pytest.approx(one["samples"])


def test_beside_a_curve(run, task_file, machine_file, tmp_path) -> None:
    """Of the most workers, in the terminal, in the document and on the page; a note is said once."""
    path = tmp_path / "curve.html"
    words = (
        "simulate",
        task_file,
        "--machine",
        machine_file,
        "--devices",
        "1,2,4",
        "--intensity",
        "-q",
    )
    ran = run(*words, "--report", path)
    assert "Scaling  predicted" in ran.out
    assert "Layers of tiny  4 workers" in ran.out
    notes = [line for line in ran.out.splitlines() if line.startswith("! ")]
    assert len(notes) == len(set(notes))
    assert read(path).sections == ["predicted-scaling", "intensity", "machine", "data"]
    value = json.loads(run(*words, "--json").out)
    assert set(value) == {"plan", "regime", "scaling", "intensity"}
    assert value["intensity"]["workers"] == 4


def test_unasked_all_workers_that_train_would_compare_share(run, task_file, machine_file) -> None:
    """Two at least: one alone sends nothing."""
    words = ("simulate", task_file, "--machine", machine_file, "--intensity", "-q", "--json")
    assert json.loads(run(*words).out)["intensity"]["workers"] == 2
    ran = run(*words[:-1], "--devices", "1")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == (
        "ridgeline: wanted at least 2 workers to share layers, got 1; a worker alone sends nothing\n"
    )
    ran = run(*words[:-1], "--devices", "3")
    assert ran.err.startswith("ridgeline: wanted a global batch that 3 workers can share equally")


def test_a_what_if_is_of_steps(
    run, task_file, machine_file, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused, and before anything is traced."""
    monkeypatch.setattr(layer_intensity, "load", lambda args: pytest.fail("the task was loaded"))
    words = (
        "simulate",
        task_file,
        "--machine",
        machine_file,
        "--intensity",
        "--what-if",
        "links=2x",
    )
    ran = run(*words, "--devices", "2")
    assert ran.status == 1
    assert ran.err == (
        "ridgeline: wanted the layers alone, got --what-if links=2x with --intensity of one number of workers; "
        "leave one of them out, or give several numbers to --devices\n"
    )
