"""Updates divided among workers: what every worker would have come to, by a part of the optimizer's state each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_cases import OPTIMIZERS, make_task, planned
from stopped_runs import cross_entropy
from torch import nn

from ridgeline.optimizer_forms import updates_by_element
from ridgeline.plan import Plan
from ridgeline.runtime.checkpoints import checkpoint
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.joining import NO_GRADIENTS
from ridgeline.runtime.sync.sharded.shards import is_shard, make_shards
from ridgeline.runtime.training.loop import train
from ridgeline.simulator.frames import step_frames
from ridgeline.synchronisation import handed_bytes, link_bytes, update_shard_elements
from ridgeline.workers.world import World
from torchrun import torchrun

HERE = Path(__file__).parent
EXACT_WAYS = ("accumulated", "channels last", "fused", "skipped by one", "skipped by all")
OF_PARTS = (
    "WorkloadError: wanted the whole state of SGD, got that of this worker's part of the parameters; call "
    "step.optimizer_state() on all workers before the step is closed: the first one gets all of it, for "
    "load_state_dict"
)
ELSEWHERE = (
    "WorkloadError: wanted what Adam remembers of its parameters, got an optimizer whose state is in the parts "
    "of all workers: read it by step.optimizer_state(), write it by load_state_dict() on all workers, and "
    "train by one step with this optimizer, which may add up losses"
)
REFUSALS = {
    "looks at whole parameters": (
        "PlanError: wanted an optimizer that updates each element by itself for sync.algorithm='sharded' "
        "(torch's SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop), got "
        "Adafactor, which may look at whole parameters; use one of those, or another algorithm"
    ),
    "not the optimizer's": (
        "WorkloadError: wanted all trained parameters in the optimizer for sync.algorithm='sharded', got SGD "
        "without scale, of which no worker has the whole gradient; give it to the optimizer, freeze it, or "
        "use another algorithm"
    ),
    "with gaps": (
        "WorkloadError: wanted parameters without gaps in their memory for sync.algorithm='sharded', got "
        "weight with strides (8, 2) for shape (4, 4); make it contiguous, or use another algorithm"
    ),
    "moved": (
        "WorkloadError: wanted the parameters where they were in memory when the step was made, got one of "
        "shape (5, 37) that was moved; write into it in place, or make the step again"
    ),
    "hook before": (
        "WorkloadError: wanted an optimizer without hooks before its step for sync.algorithm='sharded', which "
        "would find the gradients of this worker's part of the parameters, got SGD with some; remove them, or "
        "use another algorithm"
    ),
    "another step": (
        "WorkloadError: wanted an optimizer with the step of its class for sync.algorithm='sharded', which "
        "would find the gradients of this worker's part of the parameters, got SGD with another method in its "
        "place; leave it as it is, or use another algorithm"
    ),
    "written by one": (
        "WorkloadError: wanted the same state on all 2 workers after step 2, before which it was written, got "
        "another parameter last.weight on rank 1 than on rank 0 (1 of 30 tensors and settings differ); load a "
        "checkpoint on every worker, model and optimizer alike, or set on all what was set on one"
    ),
    **dict.fromkeys(
        ("state_dict, open", "state_dict, closed", "step, closed", "in parts already"), OF_PARTS
    ),
}
"""Case to message."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers left what they found and their runs."""
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What two workers over gloo found, in one start."""
    output = folder / "found.json"
    torchrun(2, HERE / "sharded_cases.py", output)
    told: dict[str, Any] = json.loads(output.read_text())
    return told


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_that_of_the_all_reduce(found: dict[str, Any], kind: str) -> None:
    """To the bit, parameters and whole state; each worker has about half of what all together remember."""
    workers = found["optimizers"][kind]
    for told in workers:
        assert told["parameters"]
        assert told["groups are whole"]
        assert told["others have no state"]
        assert told["state_bytes"] < 0.52 * told["whole_bytes"]
    assert workers[0]["state"]
    assert sum(told["state_bytes"] for told in workers) == workers[0]["whole_bytes"]


@pytest.mark.parametrize("way", EXACT_WAYS)
def test_so_is_training_in_any_way(found: dict[str, Any], way: str) -> None:
    """Micro-batches, other layouts of memory, fused kernels, and layers that some workers do not use."""
    assert [told["parameters"] for told in found["ways"][way]] == [True, True]
    assert found["ways"][way][0]["state"]


def test_clipping_is_by_the_norm_of_all_parts(found: dict[str, Any]) -> None:
    """Squares are added up in another order; also where a worker has no part of the model."""
    assert all(told["gap"] < 1e-8 for told in found["ways"]["clipped"])
    assert found["one scalar"] == pytest.approx(2.0 - 2 * 0.1 * 0.5)


def test_what_is_remembered_of_no_elements_is_whole(found: dict[str, Any]) -> None:
    """No worker has a part of them: a count of steps, say, is there all the same."""
    assert found["without elements"]


def test_hooks_behind_the_update_find_all_of_it(found: dict[str, Any]) -> None:
    """An average of the weights is that of a worker that updates all; what parameters lack is a note."""
    assert found["hooked"] == {"averages": True, "notes": [NO_GRADIENTS]}


def test_a_step_is_made_again_with_the_optimizer_of_a_closed_one(found: dict[str, Any]) -> None:
    """What refused the state of parts does no more, once the whole was loaded."""
    assert found["made again"]


def test_what_is_sent_and_shown_is_what_is_predicted(found: dict[str, Any]) -> None:
    """Bytes by bucket, those that leave a worker, and frames."""
    plan = planned("sharded")
    for told in found["optimizers"]["AdamW"]:
        sent = [handed_bytes(plan.sync, numel, 4, 2) for numel in told["payloads"]]
        assert told["sent_bytes"] == sum(sent)
        links = [link_bytes(plan.sync, numel, 4, 2) for numel in told["payloads"]]
        assert told["link_bytes"] == sum(links)
        expected = step_frames(workers=2, num_buckets=len(sent), has_buffers=True, sync=plan.sync)
        assert len(sent) > 1
        assert sorted(told["frames"]) == sorted(frame.name for frame in expected)


def test_snapshots_and_loaded_state_are_taken_up(found: dict[str, Any]) -> None:
    """Steps that were taken back are repeated to the bit, and so are those after a whole state was loaded."""
    assert found["put back"] == {"repeated": True, "loaded": True}


def test_checkpoints_are_whole(found: dict[str, Any]) -> None:
    """They hold the bits of the plain run's, also of runs stopped and taken up again by either algorithm."""
    names = ("whole", "plain", "stopped", "taken up by all")
    assert found["resumed"] == dict.fromkeys(names, True)


@pytest.mark.usefixtures("found")
def test_one_worker_takes_up_the_run_of_two(folder: Path, tmp_path: Path) -> None:
    """It comes from either checkpoint to the same bits."""
    contents = []
    for name in ("whole", "plain"):
        steps = sorted((folder / name / "checkpoints").glob("step-*"))
        run = tmp_path / name / "checkpoints"
        run.mkdir(parents=True)
        (run / steps[0].name).symlink_to(steps[0])
        train(
            make_task(cross_entropy),
            Plan(threads=1),
            World(0, 1, 0, torch.device("cpu")),
            run_dir=tmp_path / name,
            epochs=2,
            seed=5,
            resume=True,
        )
        contents.append(checkpoint.content(max(run.glob("step-*")))[:2])
    for ours, theirs in zip(*contents, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(found: dict[str, Any], what: str) -> None:
    """What cannot be divided is refused, and a part of the state is never taken for the whole."""
    assert found["messages"][what] == REFUSALS[what]


def test_state_in_parts_is_not_looked_for(found: dict[str, Any]) -> None:
    """By another step with the optimizer, by this algorithm or another, or by a script."""
    assert found["looks"] == [[ELSEWHERE] * 5] * 2


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=8),
    num_parts=st.integers(2, 9),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
)
def test_parts_of_all_workers_are_the_parameters(
    sizes: list[int], num_parts: int, dtype: torch.dtype
) -> None:
    """Each element is in the part of one worker, at the place of its gradient, and parts begin aligned."""
    named = [(str(n), nn.Parameter(torch.zeros(size, dtype=dtype))) for n, size in enumerate(sizes)]
    bucket = Bucket(0, named, 3, num_parts)
    share = bucket.payload.numel() // num_parts
    assert bucket.payload.numel() == share * num_parts
    for rank in range(num_parts):
        bucket.payload.fill_(-1.0)[rank * share : (rank + 1) * share] = float(rank)
        for parameter, held in make_shards((bucket,), rank, num_parts).items():
            assert held.parameter is parameter
            if held.part is None:
                assert held.begin == held.end
                continue
            assert is_shard(held.part)
            assert bool((held.of(bucket.views[held.position]) == float(rank)).all())
            assert held.begin * dtype.itemsize % 64 == 0
            with torch.no_grad():
                held.part.add_(1.0 + rank)
    for _, parameter in named:
        # Whoever has an element has added to it, once: parts go up with the ranks.
        steps = parameter.detach().diff()
        assert bool((parameter > 0).all())
        assert bool((steps >= 0).all())
    assert bool((bucket.behind == 0).all())


@given(
    num_elements=st.integers(0, 5000),
    element_bytes=st.sampled_from((1, 2, 4, 8, 16)),
    workers=st.integers(2, 70),
)
def test_parts_are_equal_aligned_and_no_larger_than_that(
    num_elements: int, element_bytes: int, workers: int
) -> None:
    """All parts hold all elements, and smaller ones that are aligned would not."""
    part = update_shard_elements(num_elements, element_bytes, workers)
    step = max(16, 64 // element_bytes)
    assert part % step == 0
    assert part * workers >= num_elements > (part - step) * workers - bool(not num_elements)


class Renamed(torch.optim.SGD):
    """Updates as its base does."""


class Scaled(torch.optim.SGD):
    """Does more in a step than its base."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "by_element"),
    [
        *((kind, True) for kind, _ in OPTIMIZERS.values()),
        (Renamed, True),
        (Scaled, False),
        (torch.optim.Adafactor, False),
        (torch.optim.LBFGS, False),
        (torch.optim.SparseAdam, False),
    ],
)
def test_which_optimizers_update_by_element(
    kind: type[torch.optim.Optimizer], by_element: bool
) -> None:
    """Those whose step is that of a known one of torch; what another step looks at nobody knows."""
    assert updates_by_element(kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1)) == by_element  # type: ignore[call-arg]
