"""Some workers of a job train together, as a job of their own would, and whatever the others do."""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ridgeline.errors import PlanError
from ridgeline.execution import check_plan
from ridgeline.plan import Layout, Plan
from ridgeline.runtime.layout import apply
from ridgeline.runtime.layout.ownership import (
    clip_gradients,
    parted_groups,
    replicated_axes,
    writes_checkpoint,
)
from ridgeline.workers.mesh import AXES
from ridgeline.workers.world import World
from torchrun import torchrun

SCRIPT = Path(__file__).parent / "group_cases.py"
CPU = torch.device("cpu")
MESH = "wanted a mesh of one axis, or with an axis named 'data', got "
ADVICE = "give the axis along which batches differ, for example "
OUTSIDE = "which is not in it; make the step on the ranks that are"  # of a group or a mesh, after its rank
REFUSED = {
    "two axes": f"{MESH}the axes 'dp', 'tp' of 2 x 2 workers; {ADVICE}mesh['dp']",
    "two axes without names": (
        f"{MESH}axes without names of 2 x 2 workers; {ADVICE}mesh_dim_names=('data', ...)"
    ),
    "both": ("wanted a mesh or a process group, got both; give the one that this step trains over"),
    "a world as well": "wanted a world, a mesh or a process group, got two of them; give one",
    "no mesh": (
        "wanted mesh as a torch.distributed.device_mesh.DeviceMesh, got tuple; make one with "
        "init_device_mesh(), or give a process_group"
    ),
    "no group": (
        "wanted process_group as a torch.distributed.ProcessGroup, got list; give what "
        "torch.distributed.new_group() returned"
    ),
    "outside of a group": (
        f"wanted a worker of the process group that the step trains over, got rank RANK, {OUTSIDE}"
    ),
    "outside of a mesh": (
        f"wanted a worker of the mesh that the step trains over, got rank RANK, {OUTSIDE}"
    ),
    "destroyed": (
        "wanted an open process group, got one that was destroyed; make the step before "
        "destroy_process_group(), or give another group"
    ),
    "another device": (
        "wanted device='cpu', as the mesh has it, got device='cuda'; leave the device out, or make the mesh "
        "for it"
    ),
    "workers of the plan": (
        "wanted a world of workers=4 as in the plan, got 2 processes; start them with `torchrun "
        "--nproc-per-node 4` or make a plan for 2"
    ),
}


def run(directory: Path, workers: int, *arguments: str) -> list[dict[str, Any]]:
    """What each worker of a job wrote, by rank."""
    directory.mkdir()
    torchrun(workers, SCRIPT, directory, *arguments)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(workers)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A job of four workers, in groups of two."""
    return run(tmp_path_factory.mktemp("groups") / "four", 4)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each group does, as a job of two workers."""
    directory = tmp_path_factory.mktemp("jobs")
    return [run(directory / str(number), 2, str(number)) for number in range(2)]


@pytest.mark.parametrize("given", ["group", "mesh", "one axis", "across"])
def test_a_group_trains_as_a_job_of_its_own(
    four: list[dict[str, Any]], jobs: list[list[dict[str, Any]]], given: str
) -> None:
    """Two at once, of which one makes more steps: losses, parameters, buffers and moments bit by bit."""
    for rank, told in enumerate(four):
        number, place = (rank % 2, rank // 2) if given == "across" else (rank // 2, rank % 2)
        found, wanted = told[given], jobs[number][place]
        assert found["losses"] == wanted["losses"]
        assert found["bits"] == wanted["bits"]
        assert len(wanted["losses"]) == 6 + 3 * number
        assert wanted["ranks"] == [0, 1]
        assert found["ranks"] == ([number, number + 2] if given == "across" else
                                  [2 * number, 2 * number + 1])  # fmt: skip


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wants the policies of Linux")
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 gives the threads of gloo no names"
)
@pytest.mark.parametrize("given", ["group", "mesh", "one axis", "across"])
def test_threads_that_carry_messages_preempt_nobody(
    four: list[dict[str, Any]], jobs: list[list[dict[str, Any]]], given: str
) -> None:
    """Of the job's group and of given ones; else two that send to each other wait for ticks of the scheduler."""
    for told in (*(told[given] for told in four), *jobs[0], *jobs[1]):
        policies = dict(told["policies"])
        assert policies.pop("gloo_tcp_loop") == [os.SCHED_BATCH]
        assert set(map(tuple, policies.values())) == {(os.SCHED_OTHER,)}


def test_groups_are_used_and_not_made(four: list[dict[str, Any]]) -> None:
    """Neither of a given group or mesh, nor of the job's own."""
    assert [told["new groups"] for told in four] == [0] * 4


def test_a_worker_alone_trains_alone(four: list[dict[str, Any]]) -> None:
    """In a group of one, and as a world of one within a group of four: all have the same losses, of one model."""
    losses = [told[name] for told in four for name in ("alone", "alone in a group")]
    assert losses == [losses[0]] * 8
    assert len(losses[0]) == 3


def test_losses_are_means_over_the_group(four: list[dict[str, Any]]) -> None:
    assert [told["read"] for told in four] == [[0.5], [0.5], [2.5], [2.5]]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_over_is_refused(four: list[dict[str, Any]], case: str) -> None:
    for rank, told in enumerate(four):
        assert told["refused"][case] == f"PlanError: {REFUSED[case]}".replace("RANK", str(rank))


def test_other_models_and_states_are_told_by_ranks_of_the_job(four: list[dict[str, Any]]) -> None:
    for told in four[:2]:
        assert told["differing"] == {}
    for told in four[2:]:
        assert told["differing"] == {
            "model": (
                "WorkloadError: wanted the same model on all 2 workers, got weight as float32 (3, 3) on rank "
                "3, float32 (2, 3) on rank 2 (2 of 2 parameters and buffers differ); build the same model on "
                "every worker"
            ),
            "state": (
                "WorkloadError: wanted the same state on all 2 workers after step 2, before which it was "
                "written, got the setting lr of group 0 as 0.01 on rank 2, 0.5 on rank 3 (7 of 35 tensors "
                "and settings differ); load a checkpoint on every worker, model and optimizer alike, or set "
                "on all what was set on one"
            ),
        }


def test_a_worker_that_does_not_come_is_named_by_its_rank_in_the_job(
    four: list[dict[str, Any]],
) -> None:
    """To those of its group, after the steps that it made there; the other group goes on."""
    assert [four[rank]["absent"] for rank in (0, 1, 3)] == ["", "", ""]
    text = re.sub(r"process \d+ on [^);]+", "process PID on HOST", four[2]["absent"])
    assert re.sub(r"--pid \d+", "--pid PID", text) == (
        "AbsentWorkerError: wanted all 2 workers in all_reduce/0 of step 3, got none from rank 3: it runs "
        "(process PID on HOST), between two steps. Completed: 2 steps on ranks 2 and 3. Give every worker "
        "as many batches (a DistributedSampler, drop_last=True, or a common number of steps), or see what "
        "it does: py-spy dump --pid PID"
    )


def test_a_step_of_a_destroyed_group_says_so(four: list[dict[str, Any]]) -> None:
    """Although the job's own group is open; and no thread stays that spoke for it."""
    for rank, told in enumerate(four):
        assert told["destroyed"] == {
            "told": (
                "PlanError: wanted an open process group of 2 workers, got one that was destroyed (rank "
                f"{rank}); train and choose before destroy_process_group(), or join a group and make a new "
                "TrainStep"
            ),
            "speaking": [],
        }


def test_the_mesh_says_who_holds_what(four: list[dict[str, Any]]) -> None:
    """Of two by two workers: gradients parted along one axis have the norm that they have in one place."""
    for rank, told in enumerate(four):
        owned = told["owned"]
        assert owned["norm"] == pytest.approx(owned["whole norm"], rel=1e-6)
        assert owned["parted"] == [[rank // 2 * 2, rank // 2 * 2 + 1]]
        assert owned["replicated"] == ["data"]
        assert owned["writes"] == (rank < 2)
        assert owned["along data"] == [rank % 2, rank % 2 + 2]
        assert owned["root"] == rank % 2
        assert owned["places"] == [rank // 2, rank % 2, 0]
        assert owned["sizes"] == [2, 2, 1]


def test_a_worker_alone_holds_all() -> None:
    """Without a mesh, too."""
    alone = World(0, 1, 0, CPU)
    assert replicated_axes(alone) == ()
    assert parted_groups(alone) == ()
    assert writes_checkpoint(alone)
    assert alone.ranks() == (0,)
    assert [alone.axis_size(axis) for axis in AXES] == [1] * 4
    with pytest.raises(AssertionError, match="a worker alone has no group"):
        alone.group()


@given(
    st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, None]), max_size=5),
    st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_clipping_is_that_of_torch(dtypes: Sequence[torch.dtype | None], norm: float) -> None:
    """To the last bit where nothing is parted, of gradients of several types and of none."""
    torch.manual_seed(len(dtypes))
    pairs = []
    for dtype in dtypes:
        parameter = nn.Parameter(torch.zeros(7, dtype=dtype or torch.float32))
        parameter.grad = None if dtype is None else torch.randn(7).to(dtype)
        other = nn.Parameter(parameter.detach().clone())
        other.grad = None if parameter.grad is None else parameter.grad.clone()
        pairs.append((parameter, other))
    clip_gradients([mine for mine, _ in pairs], norm)
    nn.utils.clip_grad_norm_([theirs for _, theirs in pairs], norm)
    for mine, theirs in pairs:
        if theirs.grad is None:
            assert mine.grad is None
        else:
            assert mine.grad is not None
            assert torch.equal(mine.grad, theirs.grad)


def test_axes_are_those_of_layouts() -> None:
    """And each of them is applied, once."""
    assert Layout.__struct_fields__ == AXES
    assert sorted(apply._ORDER) == sorted(AXES)


@pytest.mark.parametrize("axis", AXES[1:])
def test_an_axis_that_is_not_offered_is_refused_as_in_plans(axis: str) -> None:
    """In the same words, before anything is exchanged."""
    layout = Layout(**{axis: 2})
    with pytest.raises(PlanError) as of_plan:
        check_plan(Plan(workers=2, layout=layout), "cpu")
    with pytest.raises(PlanError) as applied:
        apply.apply_layout(nn.Linear(2, 2), layout, World(0, 2, 0, CPU))
    assert str(applied.value) == str(of_plan.value)


def test_a_layout_of_one_worker_leaves_the_model_as_it_is() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    for layout in (None, Layout()):
        apply.apply_layout(model, layout, World(0, 1, 0, CPU))
    assert torch.equal(model.weight, before)
