"""A step under a plan: what it refuses, what it records, and that it equals the loop by hand."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import PlanError, WorkloadError
from ridgeline.plan import Layout, Plan, Sync
from ridgeline.runtime.steps.step import WARMUP_STEPS, PlannedStep


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, 4, generator=generator),
        "y": torch.randint(0, 2, (size,), generator=generator),
    }


def test_a_worker_alone_equals_the_loop_by_hand_bitwise() -> None:
    """Losses and parameters, with dropout and an uneven last batch, have the bits of the plain loop."""
    model, optimizer = make()
    reference, reference_optimizer = make()
    with PlannedStep(model, loss_fn, optimizer, Plan(), device="cpu") as step:
        for index in range(6):
            batch = batch_of(8 if index < 5 else 3, index)
            torch.manual_seed(index)
            loss = step(batch)
            torch.manual_seed(index)
            reference_optimizer.zero_grad()
            wanted = loss_fn(reference, batch)
            wanted.backward()
            reference_optimizer.step()
            assert torch.equal(loss, wanted.detach())
            assert not loss.requires_grad
            assert loss.dim() == 0
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_frames_cover_the_step_without_gaps_or_overlap() -> None:
    """Input, forward, backward and optimizer follow each other and end with the step."""
    model, optimizer = make()
    with PlannedStep(model, loss_fn, optimizer, Plan(), device="cpu", name="mlp") as step:
        for index in range(WARMUP_STEPS + 5):
            step(batch_of(8, index))
        timeline = step.timeline()
    assert [s.name for s in timeline.frames] == ["input", "forward", "backward", "optimizer"]
    assert len(timeline.steps_ns) == 5
    assert timeline.frames[0].start_ns == 0
    assert timeline.frames[-1].end_ns == timeline.step_ns
    compute = timeline.lane("compute")
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(compute))
    assert 0 < timeline.counters["overhead_ns"] < timeline.step_ns


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("vector", r"wanted a scalar loss tensor, got shape \(8,\) from loss_fn; reduce it"),
        ("number", "wanted a scalar loss tensor, got float from loss_fn"),
        ("constant", "wanted a loss that depends on the parameters, got one without gradient"),
    ],
)
def test_a_loss_that_backward_cannot_start_from_is_refused(returned: str, message: str) -> None:
    """The message says what came back and what to do; the parameters are untouched."""

    def bad(model: nn.Module, batch: Any) -> Any:
        out = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return {"vector": out, "number": 1.5, "constant": out.mean().detach()}[returned]

    model, optimizer = make()
    before = [p.detach().clone() for p in model.parameters()]
    with (
        PlannedStep(model, bad, optimizer, Plan(), device="cpu") as step,
        pytest.raises(WorkloadError, match=message),
    ):
        step(batch_of(8, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            Plan(workers=2),
            "wanted a world of workers=2 as in the plan, got 1 processes; start them with `torchrun",
        ),
        (
            Plan(execution="script"),
            "on cpu out of eager, compiled, regional, step-graph, packaged, got 'script'",
        ),
        (Plan(execution="graph"), "wanted an execution mode for a training step on cpu out of"),
        (Plan(precision="tf32"), "wanted a CUDA device for precision='tf32', got cpu"),
        (
            Plan(precision="fp16"),
            "wanted precision to be one of 'as-is', 'tf32', 'bf16', got 'fp16'",
        ),
        (
            Plan(sync=Sync(algorithm="kvstore", options={"servers": 1})),
            "wanted sync.options['kind']='dist_async' for sync.options['servers'], got 'dist_sync'",
        ),
        (Plan(sync=Sync(every=4)), "wanted sync.every=1 for workers=1, got 4"),
        (
            Plan(workers=2, layout=Layout(tensor=2)),
            "wanted all workers along the data axis, got Layout",
        ),
    ],
)
def test_a_plan_that_cannot_be_honoured_is_refused(plan: Plan, message: str) -> None:
    """Nothing is silently replaced: the field, what it may be, and what to do are named."""
    model, optimizer = make()
    with pytest.raises(PlanError, match=re.escape(message)):
        PlannedStep(model, loss_fn, optimizer, plan, device="cpu")


def test_bf16_is_autocast() -> None:
    """Precision bf16 computes the forward's matrix products in bfloat16."""
    seen = []
    model, optimizer = make()
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    with PlannedStep(model, loss_fn, optimizer, Plan(precision="bf16"), device="cpu") as step:
        step(batch_of(8, 0))
    assert seen == [torch.bfloat16]


def test_a_saved_plan_is_taken_by_its_path(tmp_path: Any) -> None:
    """A path stands for the plan in the file."""
    path = Plan(accumulate=2).save(tmp_path / "plan.json")
    model, optimizer = make()
    with PlannedStep(model, loss_fn, optimizer, path, device="cpu") as step:
        for index in range(WARMUP_STEPS + 1):
            step(batch_of(8, index))
        assert step.plan.accumulate == 2
        assert [s.name for s in step.timeline().lane("compute")][:2] == ["micro/0", "forward"]


def test_clipping_counts_parameters_that_were_added_later() -> None:
    """The norm is that of all groups that the optimizer has at the moment."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.0)
    with PlannedStep(model, loss_fn, optimizer, Plan(), clip_norm=1e-3, device="cpu") as step:
        optimizer.add_param_group({"params": model[0].parameters()})
        step(batch_of(8, 0))
    squares = [float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None]
    assert len(squares) == 4
    assert sum(squares) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


def test_groups_that_are_added_later_are_fused_too() -> None:
    """As they are where a run that was stopped goes on, whose step finds all groups when it is made."""
    model, _ = make()
    first, *others = model.children()
    optimizer = torch.optim.AdamW(first.parameters(), 1e-2)
    with PlannedStep(model, loss_fn, optimizer, Plan(optimizer="fused"), device="cpu") as step:
        step(batch_of(8, 0))
        rest = [parameter for module in others for parameter in module.parameters()]
        optimizer.add_param_group({"params": rest, "lr": 3e-3})
        step(batch_of(8, 1))
        assert [group["fused"] for group in optimizer.param_groups] == [True, True]
        assert "optimizer group 1 uses its fused form" in step.notes


@pytest.mark.parametrize("norm", [0, -1.0, math.inf, math.nan, True, "1.0"])
def test_a_norm_that_cannot_be_clipped_to_is_refused(norm: Any) -> None:
    """0 would train nothing and a negative one uphill."""
    model, optimizer = make()
    with pytest.raises(PlanError) as caught:
        PlannedStep(model, loss_fn, optimizer, Plan(), clip_norm=norm, device="cpu")
    assert str(caught.value) == (
        f"wanted clip_norm as a finite number above 0, or None, got {norm!r}; give the largest total norm that "
        "gradients may have, or None to leave them as they are"
    )


def test_an_optimizer_of_another_model_is_refused() -> None:
    """It would train nothing; one of parameters that the loss function holds is none such."""
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    batch = torch.ones(3, 4)
    step = PlannedStep(
        model,
        lambda model, batch: model(batch).square().mean(),
        torch.optim.SGD(other.parameters(), 0.1),
        Plan(),
    )
    with step, pytest.raises(WorkloadError) as caught:
        step(batch)
    assert str(caught.value) == (
        "wanted an optimizer of parameters that the loss has, got SGD of 2 that are not in Linear and "
        "got no gradient; make it from model.parameters()"
    )
    head = nn.Linear(2, 1)
    with PlannedStep(
        model,
        lambda model, batch: head(model(batch)).square().mean(),
        torch.optim.SGD(head.parameters(), 0.1),
        Plan(),
    ) as step:
        assert float(step(batch)) > float(step(batch))


def test_threads_are_given_back() -> None:
    """But not where somebody has set them since."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        PlannedStep(model, nn.Module.__call__, optimizer, Plan(threads=1)).close()
        assert torch.get_num_threads() == 2
        step = PlannedStep(model, nn.Module.__call__, optimizer, Plan(threads=1))
        torch.set_num_threads(3)
        step.close()
        assert torch.get_num_threads() == 3
        plans = Plan(threads=1), Plan(threads=2)
        for first, last in ((0, 1), (1, 0)):  # of two at a time, whichever ends first
            steps = [PlannedStep(model, nn.Module.__call__, optimizer, plan) for plan in plans]
            steps[first].close()
            assert torch.get_num_threads() == last + 1
            steps[last].close()
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
