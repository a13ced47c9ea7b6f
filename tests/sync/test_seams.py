"""A transport and a codec that a user adds, one file and one entry each, are what the built-in ones are."""

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.plan import Plan, Sync
from ridgeline.planner import choose
from ridgeline.planner.labels import label
from ridgeline.simulator.frames import step_frames
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS
from strategies import make_machine, make_workload
from torchrun import torchrun

HERE = Path(__file__).parent
MS, MIB = 1_000_000, 1 << 20


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of both toys, which their files register in every process that imports them."""
    for table, name in ((ALGORITHMS, "gather_all"), (COMPRESSIONS, "coarse")):
        monkeypatch.setitem(table, name, None)  # type: ignore[arg-type] - so that it goes afterwards
    import toy_codec
    import toy_transport

    ALGORITHMS["gather_all"], COMPRESSIONS["coarse"] = toy_transport.ENTRY, toy_codec.ENTRY


def planned(**sync: Any) -> Plan:
    return Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(256, 1024), **sync))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two workers over gloo found, in one start."""
    output = tmp_path_factory.mktemp("seams") / "found.json"
    torchrun(2, HERE / "seam_cases.py", output)
    told: dict[str, Any] = json.loads(output.read_text())
    return told


@pytest.mark.parametrize("partly", ["", ", partly"])
def test_a_transport_of_ones_own_trains(found: dict[str, Any], partly: str) -> None:
    """To the bits of the all-reduce of two workers; flags of what one of them does not use come along."""
    assert found[f"toy{partly}"]["parameters"] == found[f"plain{partly}"]["parameters"]


@pytest.mark.usefixtures("toys")
def test_frames_bear_the_name_of_the_entry(found: dict[str, Any]) -> None:
    """The measured frames are those that the simulator predicts."""
    for name, plan in (
        ("plain", planned()),
        ("toy", planned(algorithm="gather_all")),
        ("codec", planned(compression="coarse")),
    ):
        frames = found[name]["frames"]
        num_buckets = sum("backward/" in frame for frame in frames) - 1
        expected = step_frames(workers=2, num_buckets=num_buckets, sync=plan.sync)
        assert num_buckets > 1
        assert sorted(frames) == sorted(frame.name for frame in expected)


def test_a_codec_of_ones_own_trains(found: dict[str, Any]) -> None:
    """Near the plain parameters, a quarter of the bytes, and the same over another transport."""
    plain, coarse = (found[name]["parameters"] for name in ("plain", "codec"))
    gaps = [
        abs(a - b) for p, q in zip(plain, coarse, strict=True) for a, b in zip(p, q, strict=True)
    ]
    assert 0.0 < max(gaps) < 0.2
    assert found["codec over toy"]["parameters"] == coarse
    # A byte an element to be scattered, and half as many that are gathered; scales beside.
    assert 0.25 < found["codec"]["sent_bytes"] / found["plain"]["sent_bytes"] < 0.5


def test_nothing_is_lost_for_good(found: dict[str, Any]) -> None:
    """What arrived in 400 steps and what is left is the sum of all gradients, and what is left stays small."""
    told = found["fed back"]
    assert told["gap"] < 1e-3
    assert told["late"] < 1.5 * told["early"]


def test_state_that_one_worker_cannot_take_stops_all(found: dict[str, Any]) -> None:
    """Who has it raises the error as it is; the others, who would wait for that state, learn of it."""
    first, second = found["unreadable"]
    assert second == "OSError: the file is gone"
    assert first == (
        "CheckpointError: wanted to save the state of the run, got OSError: the file is gone on rank 1; the "
        "previous checkpoint is untouched: continue with --resume"
    )


def test_what_is_remembered_is_saved_and_put_back(found: dict[str, Any]) -> None:
    """By snapshots, and by checkpoints for each worker."""
    assert found["put back"] == dict.fromkeys(("moved", "restored", "gathered", "apart"), True)


def test_a_run_goes_on_with_what_was_left_out(found: dict[str, Any]) -> None:
    """A run that was stopped ends with the bits of one that was not."""
    assert found["resumed"] == {
        "equal": True,
        "steps": ["step-0000024", "step-0000024"],
        "was_stopped": True,
    }


@pytest.mark.usefixtures("toys")
def test_they_are_predicted_ranked_and_named() -> None:
    """By what their entries say; a codec only where compression is allowed."""
    machine = make_machine()
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    both = planned(algorithm="gather_all", compression="coarse")
    assert label(both).endswith("gathering all, coarse gradients, buckets 256 B, 1.00 KiB")
    timeline = simulate(machine, workload, planned(algorithm="gather_all"))
    assert any(span.name == "gather_all/0" for span in timeline.frames)
    wanted: dict[tuple[str, ...], set[str]] = {(): {"none"}, ("compression",): {"none", "coarse"}}
    for allowed, compressions in wanted.items():
        ranking = choose(machine, workload, world_size=2, allow=allowed)
        plans = [candidate.plan for candidate in ranking.candidates if candidate.plan.workers == 2]
        assert {plan.sync.algorithm for plan in plans} >= {"all_reduce", "gather_all"}
        found = {plan.sync.compression for plan in plans}
        assert found == compressions if not allowed else found >= compressions
