"""Data parallelism equals DistributedDataParallel, in every case that a training step can meet."""

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.simulator.frames import step_frames
from torchrun import torchrun

TWO_WORKERS = Path(__file__).parent / "two_workers.py"
THREE_WORKERS = Path(__file__).parent / "parity_cases.py"
CASES = (
    "plain",
    "one bucket",
    "bucket a gradient",
    "uneven last batch",
    "frozen parameters",
    "parameters used on some workers only",
    "layers computed again on some workers only",
    "tied weights, dict batch",
    "two dtypes",
    "accumulation",
    "clipping",
    "scheduler",
    "buffers of all kinds",
    "gradients kept, a hook that comes later",
)


def run_workers(script: Path, workers: int, output: Path) -> dict[str, Any]:
    """What worker 0 of a script wrote, run by real processes over gloo."""
    torchrun(workers, script, output)
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_workers(TWO_WORKERS, 2, tmp_path_factory.mktemp("parity") / "two.json")


@pytest.fixture(scope="module")
def two(two_workers: dict[str, Any]) -> dict[str, Any]:
    return two_workers["each"]["results"]


@pytest.fixture(scope="module")
def two_by_last(two_workers: dict[str, Any]) -> dict[str, Any]:
    return two_workers["last"]["results"]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_workers(THREE_WORKERS, 3, tmp_path_factory.mktemp("parity") / "three.json")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_ddp_bitwise(two: dict[str, Any], case: str, optimizer: str) -> None:
    """After 20 steps with two workers every parameter has the bits that DDP gives it."""
    result = two[f"{case} / {optimizer}"]
    assert result["equal"], f"largest relative difference {result['gap']}"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_the_last_gradient_of_a_bucket_tells_of_all(
    two_by_last: dict[str, Any], case: str, optimizer: str
) -> None:
    """Listening to one gradient a bucket gives the same bits; where that cannot do, each is listened to."""
    result = two_by_last[f"{case} / {optimizer}"]
    assert result["equal"], f"largest relative difference {result['gap']}"
    assert result["buffers_follow_worker_0"]
    assert result["same_gradients_missing"]
    is_regular = case not in (
        "accumulation",
        "parameters used on some workers only",
        "layers computed again on some workers only",
        "gradients kept, a hook that comes later",
    )
    # The layer `never` of the plain model has no gradients: its buckets leave at the end.
    wanted = {"tied weights, dict batch": 1, "two dtypes": 2, "bucket a gradient": 9}
    if case in wanted:
        assert result["hooks"] == wanted[case]
    assert is_regular == (result["hooks"] <= result["buckets"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_three_workers_equal_ddp_closely(three: dict[str, Any], case: str, optimizer: str) -> None:
    """A third is no binary fraction: DDP rounds each share, we round the sum once; they stay close."""
    # AdamW divides by the root of tiny second moments, which magnifies the last bit at first.
    assert three[f"{case} / {optimizer}"]["gap"] < (1e-5 if optimizer == "sgd" else 1e-3)


@pytest.mark.parametrize("case", CASES)
def test_buffers_follow_worker_0(two: dict[str, Any], case: str) -> None:
    """After a step all workers have worker 0's buffers."""
    assert two[f"{case} / sgd"]["buffers_follow_worker_0"]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_missing_where_ddp_leaves_them_missing(
    two: dict[str, Any], case: str
) -> None:
    """A parameter that no worker used keeps None, so that weight decay and momentum leave it alone."""
    assert two[f"{case} / sgd"]["same_gradients_missing"]


def test_a_parameter_of_an_earlier_micro_batch_is_averaged(two: dict[str, Any]) -> None:
    """The gradient of a parameter that the last micro-batch does not use is not lost."""
    assert two["used in the first micro-batch only"]["gap"] < 1e-6


@pytest.mark.parametrize("case", ["plain", "bucket a gradient", "tied weights, dict batch"])
def test_measured_frames_are_those_of_the_task_builder(two: dict[str, Any], case: str) -> None:
    """Every frame that the simulator predicts is measured under its name and lane, and no other."""
    result = two[f"{case} / sgd"]
    wanted = step_frames(
        workers=2, num_buckets=result["buckets"], has_buffers=case != "tied weights, dict batch"
    )
    assert sorted(map(tuple, result["frames"])) == sorted((f.name, f.lane) for f in wanted)


@pytest.mark.parametrize("listens", ["each", "last"])
def test_what_cannot_be_synchronised_is_refused(listens: str, two_workers: dict[str, Any]) -> None:
    """Rather than averaged wrongly or not at all, and by name."""
    messages = two_workers[listens]["messages"]
    late = {
        "each": "layer.bias",
        "last": "one of layer.bias, layer.weight, first.bias, first.weight",
    }
    sends = (
        "wanted a network whose gradients the step averages over 2 workers, got one in {}, which averages them "
        "itself; leave that out, and give the step the network as it was before (the .module of a wrapper), "
        "which the loss function calls"
    )
    whole = (
        "wanted parameters and buffers that each of 2 workers holds whole, got '{}' as a DTensor, of which each "
        "holds a part; give the network before it is split (sync.algorithm='sharded' splits the optimizer's "
        "state)"
    )
    assert messages == {
        "wrapped": sends.format("DistributedDataParallel"),
        "wrapped_in_the_loss": sends.format("DistributedDataParallel"),
        "fully_sharded": sends.format("FSDPLinear"),
        "split": whole.format("0.weight"),
        "split_buffer": whole.format("mask"),
        "other_plans": (
            "wanted the same plan on all 2 workers, got accumulate=2 on rank 1 and 1 on rank 0; "
            "sync.algorithm='ring' on rank 1 and 'all_reduce' on rank 0; sync.bucket_bytes=[64] on rank 1 and "
            "[4194304, 26214400] on rank 0; give every worker the same plan"
        ),
        "other_clipping": (
            "wanted the same plan and clip_norm on all 2 workers, got clip_norm=0.5 on rank 1 and None on "
            "rank 0; give every worker the same plan and clip_norm"
        ),
        "other_strides": (
            "wanted the same model on all 2 workers, got weight as float32 (2, 2, 2, 2) with strides (8, 1, "
            "4, 2) on rank 1, float32 (2, 2, 2, 2) on rank 0 (1 of 2 parameters and buffers differ); build the "
            "same model on every worker"
        ),
        "unfrozen": (
            "wanted the parameters to require gradients as when the step was made, got 0.weight that does "
            "now; make the step again after unfreezing"
        ),
        "twice": (
            "wanted one gradient for layer.bias in a backward pass, got a second after the first was sent; "
            "use checkpoint(..., use_reentrant=False), or run the layer in one checkpoint"
        ),
        "outside": (
            "wanted an optimizer of the model's parameters as they were when the step was made, got another "
            "one of shape (3,) in group 0, which the workers would not exchange; make it part of the model, "
            "and the step again"
        ),
        "replaced": (
            "wanted an optimizer of the model's parameters as they were when the step was made, got another "
            "one of shape (2, 4) in group 1, which the workers would not exchange; make it part of the "
            "model, and the step again"
        ),
        "interrupted": (
            "wanted the last backward pass to have ended, got one that raised while gradients were on their "
            "way to other workers; make the step again on all workers"
        ),
        "late": (
            f"wanted one gradient for {late[listens]} in a backward pass, got a second after the first was "
            "sent; use checkpoint(..., use_reentrant=False), or run the layer in one checkpoint"
        ),
    }


@pytest.mark.parametrize("listens", ["each", "last"])
def test_state_that_differs_between_workers_is_refused(
    listens: str, two_workers: dict[str, Any]
) -> None:
    """At the first step, and in the step after somebody wrote into it on one worker; by name.

    Through `.data`, in the next step whose number is a power of two.
    """
    what = "load a checkpoint on every worker, model and optimizer alike, or set on all what was set on one"
    first = "wanted the same state on all 2 workers at its first step, got"
    later = "wanted the same state on all 2 workers after step 3, before which it was written, got"
    seen = "wanted the same state on all 2 workers after step 32, before which it was written, got"
    assert two_workers[listens]["states"] == {
        "model loaded first": (
            f"{first} another parameter 0.weight on rank 1 than on rank 0 (9 of 20 tensors and settings "
            f"differ); {what}"
        ),
        "optimizer loaded first": (
            f"{first} optimizer state step of 0.weight on rank 1 and none on rank 0 (18 of 38 tensors and "
            f"settings differ); {what}"
        ),
        "buffer written first": (
            f"{first} another buffer 1.running_mean on rank 1 than on rank 0 (1 of 20 tensors and settings "
            f"differ); {what}"
        ),
        "both loaded first, by all": "ran",
        "model loaded later": (
            f"{later} another parameter 0.weight on rank 1 than on rank 0 (6 of 35 tensors and settings "
            f"differ); {what}"
        ),
        "optimizer loaded later": (
            f"{later} another optimizer state step of 0.weight on rank 1 than on rank 0 (24 of 35 tensors "
            f"and settings differ); {what}"
        ),
        "both loaded later, by all": "ran",
        "given other memory later": (
            f"{later} another parameter 2.weight on rank 1 than on rank 0 (1 of 35 tensors and settings "
            f"differ); {what}"
        ),
        "other parameters put in place later": (
            f"{later} another parameter 0.weight on rank 1 than on rank 0 (6 of 35 tensors and settings "
            f"differ); {what}"
        ),
        "equal parameters put in place later": (
            f"{later} another parameter 0.weight on rank 1 than on rank 0 (6 of 35 tensors and settings "
            f"differ); {what}"
        ),
        "copied through data later": (
            f"{seen} another parameter 2.bias on rank 1 than on rank 0 (1 of 35 tensors and settings "
            f"differ); {what}"
        ),
        "scaled through data later": (
            f"{seen} another parameter 0.weight on rank 1 than on rank 0 (6 of 35 tensors and settings "
            f"differ); {what}"
        ),
        "scaled through data, by all": "ran",
        "learning rate set later": (
            f"{later} the setting lr of group 0 as 0.01 on rank 0, 0.5 on rank 1 (7 of 35 tensors and "
            f"settings differ); {what}"
        ),
        "learning rate scheduled, by all": "ran",
        "written in every step, by all": "ran, compared after 2, 3, 5, 9, 17, 33",
    }
