"""Workers that train alone between two exchanges: what they have in common, and when."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from held_runs import HELD_STEPS, SIZES
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import PlanError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps.body.requirements import check_training
from ridgeline.simulator.frames import step_frames
from ridgeline.synchronisation import cut_fragments, offered_compressions
from torchrun import torchrun

HERE = Path(__file__).parent
LAWS = (
    "average / sgd",
    "average / adamw",
    "nesterov / adamw",
    "clipped",
    "partly",
    "by the toy transport",
)
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two workers over gloo found, in one start."""
    output = tmp_path_factory.mktemp("local") / "found.json"
    torchrun(2, HERE / "local_cases.py", output)
    told: dict[str, Any] = json.loads(output.read_text())
    return told


@pytest.mark.parametrize("law", LAWS)
def test_rounds_are_those_of_workers_trained_one_by_one(found: dict[str, Any], law: str) -> None:
    """The common parameters are the mean of what each worker comes to alone, or torch's Nesterov of it.

    Clipping is of a worker's own gradients, a layer that one worker does not use moves by the other alone, and
    the inner optimizers go on with their own state.
    """
    assert found["laws"][law]["gap"] < ROUNDING


def test_workers_have_the_same_bits_after_an_exchange_and_no_sooner(found: dict[str, Any]) -> None:
    """Parameters and buffers."""
    for law, told in found["laws"].items():
        assert told["equal"] == [True] * 3, law
        assert told["apart"] == [True] * 9, law


def test_a_delay_is_that_of_differences_used_later(found: dict[str, Any]) -> None:
    """Common parameters take the means when they arrive; workers go on from between those and their own."""
    assert all(gap < ROUNDING for gap in found["delayed"].values()), found["delayed"]
    assert found["delayed"].keys() == {"1", "3"}


def test_codecs_run_beside_steps(found: dict[str, Any]) -> None:
    """In a thread of their own, and their means are near those that nothing encodes."""
    gaps = found["encoded beside steps"]
    assert set(gaps) == {*offered_compressions("cpu"), "coarse"}
    assert gaps["none"] < ROUNDING
    assert gaps["bf16"] < 1e-3, "half the bits of a step would be more"
    # Each loses something: 16 bits, rounded once for two workers, little more than sums round.
    assert all(1000 * gaps["none"] < gap < 0.02 for name, gap in gaps.items() if name != "none"), (
        gaps
    )


def test_momentum_of_zero_at_full_rate_is_the_average(found: dict[str, Any]) -> None:
    """To the bit."""
    assert found["laws"]["nesterov at rest"]["gap"] == 0.0


def test_it_is_not_the_exchange_of_gradients(found: dict[str, Any]) -> None:
    """Else the laws above would say nothing."""
    assert found["laws"]["exchanging gradients"]["gap"] > 100 * ROUNDING


def test_a_codec_carries_the_differences(found: dict[str, Any]) -> None:
    """Less is sent, the result is near, and over 100 exchanges nothing is lost for good."""
    plain, coarse = (found["laws"][law] for law in ("average / sgd", "by the toy codec"))
    assert 0.0 < coarse["gap"] < 0.1
    assert coarse["sent_bytes"] < plain["sent_bytes"] / 2
    fed_back = found["fed back"]
    assert fed_back["gap"] < 1e-3
    assert fed_back["late"] < 1.5 * fed_back["early"]


def test_every_codec_carries_the_differences(found: dict[str, Any]) -> None:
    """All workers have the same bits after each exchange, near those without a codec."""
    assert set(found["codecs"]) == {*offered_compressions("cpu"), "coarse"}
    for name, told in found["codecs"].items():
        assert told["equal"] == [True] * 3, name
        assert told["gap"] < 0.05, name


def test_every_parameter_is_exchanged(found: dict[str, Any]) -> None:
    """Whatever its size, that of the buckets and the number of fragments."""
    assert found["all exchanged"] == [True] * 48


def test_fragments_take_turns(found: dict[str, Any]) -> None:
    """One in a step, each once in `every` steps, in the order of gradients: the last layers first."""
    told = found["fragments"]
    parts = [set(told["became"][str(step)]) for step in range(1, 11)]
    due = {1: 0, 3: 1, 4: 2, 6: 0, 8: 1, 9: 2}
    assert [bool(part) for part in parts] == [place in due for place in range(10)]
    assert parts[:5] == parts[5:]
    assert set().union(*parts) == set(told["names"])
    assert sum(map(len, parts[:5])) == len(told["names"])
    assert "last.bias" in parts[1]
    assert "first.weight" in parts[4]


def test_a_trial_holds_exchanges_back_and_lets_one_go(found: dict[str, Any]) -> None:
    """That of the largest fragment, in the very next step, with its share of all bytes; the others follow."""
    told = found["held"]
    assert told["same"][:HELD_STEPS] == [[]] * HELD_STEPS
    assert told["same"][HELD_STEPS:] == [[1], [0], [2]]
    counts = told["exchanges"]
    assert counts[:HELD_STEPS] == [0] * HELD_STEPS
    assert counts[HELD_STEPS:] == [3, 4, 5], (
        "the first two are compared, which a trial is not to measure"
    )
    assert told["share"] == SIZES[1] / sum(SIZES)


def test_what_all_workers_have_is_not_sent(found: dict[str, Any]) -> None:
    """A model is broadcast where one worker's differs, and not where all have the same bits."""
    assert found["begun"] == {"alike": [0, 3], "apart": [3, 3]}


def test_frozen_parameters_that_the_step_writes_follow_worker_0(found: dict[str, Any]) -> None:
    """A teacher has the same bits after each exchange, and others before; a frozen backbone is not sent."""
    teacher = found["teacher"]
    assert teacher["rounds"] == [True] * 3
    assert not any(teacher["between"])
    assert not any(teacher["moved"])


def test_frames_are_those_of_the_prediction(found: dict[str, Any]) -> None:
    """In a step without exchange, too, by the name of the algorithm."""
    for law, algorithm in (("average / sgd", "all_reduce"), ("by the toy transport", "gather_all")):
        frames = [
            frame.name.replace("all_reduce", algorithm)
            for frame in step_frames(workers=2, num_buckets=3, sync=Sync(every=4))
        ]
        assert sorted(found["laws"][law]["frames"]) == sorted(frames)


def test_notes_tell_that_workers_differ(found: dict[str, Any]) -> None:
    """And why nobody compares them."""
    note = (
        "workers train alone and exchange parameters every 4 steps: between two exchanges they hold "
        "different parameters, which are not compared, and the median step has no exchange"
    )
    assert found["laws"]["average / sgd"]["notes"] == [note]


def test_what_must_be_alike_is_compared(found: dict[str, Any]) -> None:
    """All state at first, then common parameters and settings; a worker's own parameters are its own."""
    rest = "; load a checkpoint on every worker, model and optimizer alike, or set on all what was set on one"
    head = "wanted the same state on all 2 workers"
    assert found["messages"] == {
        "written first": (
            f"{head} at its first step, got another parameter first.weight on rank 1 than on rank 0 (1 of 21 "
            f"tensors and settings differ){rest}"
        ),
        "written later": "",
        "rate set": (
            f"{head} after exchange 1, got the setting lr of group 0 as 0.01 on rank 0, 0.5 on rank 1 (1 of "
            f"19 tensors and settings differ){rest}"
        ),
        "common written": (
            f"{head} after exchange 1, got another common parameter last.bias on rank 1 than on rank 0 (1 of "
            f"19 tensors and settings differ){rest}"
        ),
        "steps counted apart": (
            f"{head} at its first step, got the setting number of local steps as 0 on rank 0, 7 on rank 1 (8 "
            f"of 19 tensors and settings differ){rest}"
        ),
    }


def test_another_step_that_trains_them_apart_is_named(found: dict[str, Any]) -> None:
    """No checkpoint would help while both go on."""
    apart = (
        "wanted the same state on all 2 workers at its first step, got another parameter weight on rank 1 than on "
        "rank 0 (2 of 11 tensors and settings differ); "
    )
    assert found["beside"] == [
        apart
        + "another step that is open trains it on each worker alone between two exchanges (sync.every above "
        "1): train it in one step, by one loss and one optimizer, or exchange gradients in every step of both; to "
        "go on without the other step close it, and load the same parameters on every worker",
        apart
        + "load a checkpoint on every worker, model and optimizer alike, or set on all what was set on one",
    ]


def test_what_is_common_is_saved_and_put_back(found: dict[str, Any]) -> None:
    """By snapshots in the middle of a round, after which the same steps give the same bits, and checkpoints."""
    names = ("kinds", "moved", "restored", "repeated", "gathered")
    assert found["put back"] == dict.fromkeys(names, True)
    assert found["delayed, put back"] == dict.fromkeys(names, True)
    assert found["encoded, put back"] == dict.fromkeys(names, True)


def test_a_run_that_is_stopped_anywhere_goes_on(found: dict[str, Any]) -> None:
    """To the bits of one that was not, of all workers, wherever in a round it was stopped."""
    assert found["resumed"]["equal"] == dict.fromkeys(("1", "4", "5", "8"), True)
    assert found["resumed"]["other workers"]
    for name in ("delayed, resumed", "encoded, resumed"):
        assert found[name]["equal"] == dict.fromkeys(("4", "6"), True)


def test_all_stop_for_one_worker_that_diverged(found: dict[str, Any]) -> None:
    """Its parameters are no numbers any more before the others get their share of that."""
    assert found["diverged"].startswith(
        "wanted finite parameters, got NaN or infinity at step 2 (epoch 0) on rank 1: parameter"
    )


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 8))
def test_fragments_hold_every_tensor_once(sizes: list[int], num_fragments: int) -> None:
    """As neighbours, none of more bytes than its share and the largest tensor."""
    fragments = cut_fragments(sizes, num_fragments)
    assert len(fragments) == num_fragments
    assert [place for fragment in fragments for place in fragment] == list(range(len(sizes)))
    most = sum(sizes) / num_fragments + max(sizes, default=0)
    assert all(sum(sizes[place] for place in fragment) <= most for fragment in fragments)


def test_an_optimizer_that_exchanges_parameters_itself_is_refused() -> None:
    """As torch's ZeroRedundancyOptimizer in each step: then no worker trains alone."""
    kind = type("Dividing", (torch.optim.SGD,), {"__module__": "torch.distributed.optim.dividing"})
    own = type("Own", (kind,), {"__module__": "mine"})
    optimizer = own([torch.nn.Parameter(torch.zeros(1))], 0.1)
    check_training(optimizer, Plan(workers=2), None)
    with pytest.raises(PlanError) as refused:
        check_training(optimizer, Plan(workers=2, sync=Sync(every=3)), None)
    assert str(refused.value) == (
        "wanted an optimizer of each worker's own for sync.every=3, got Own, which exchanges parameters among "
        "workers itself; use an optimizer of torch.optim, or sync.every=1"
    )
