"""Steps that train a part: weights elsewhere keep their gradients, and the part trains as it does eagerly."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from step_pairs import adamw, batch_of, loss_fn, make, pair_of, sgd
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ridgeline.errors import CaptureError, WorkloadError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.program import trace_step
from ridgeline.state.random_state import seed_all

pytestmark = pytest.mark.usefixtures("interpreted")


def test_an_optimizer_of_the_head_alone() -> None:
    """The backbone requires gradients and nobody uses them; adding its parameters later goes on."""

    def head(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.get_submodule("6").parameters(), 0.01)

    def add(step: PlannedStep) -> None:
        backbone = step.model.get_submodule("4").parameters()
        step.model.zero_grad()
        step.optimizer.add_param_group({"params": list(backbone), "lr": 0.001})

    with pair_of(make, head) as pair:
        pair.train(8, {4: add})
        assert pair.counters()["recaptures"] == 1
        prepared = pair.program._runner._prepared
        assert not any(is_fake(tensor) for tensor in prepared[0].program.arguments())
        said = "one program leaves no gradients of parameters that its optimizer does not hold, such as 0.w"
        assert any(note.startswith(said) for note in pair.program.notes)


def is_fake(tensor: Any) -> bool:
    """Whether it is a tensor of a trace, without data."""
    return isinstance(tensor, FakeTensor)


def generator_loss(critic: nn.Module) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.softplus(-critic(model(batch["x"]))).mean()

    return loss


def critic_loss(generator: nn.Module) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        made = generator(batch["x"]).detach()
        return (
            nn.functional.softplus(-model(batch["x"])) + nn.functional.softplus(model(made))
        ).mean()

    return loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_networks_that_train_against_each_other(accumulate: int) -> None:
    """Each step goes through the other's weights; both end where eager steps end."""
    finals = []
    for execution in ("step-graph", "eager"):
        torch.manual_seed(0)
        nets = [nn.Linear(6, 1), nn.Linear(6, 6)]
        losses = [critic_loss(nets[1]), generator_loss(nets[0])]
        plan = Plan(execution=execution, accumulate=accumulate)
        steps = [
            PlannedStep(net, loss, adamw(net), plan, device="cpu")
            for net, loss in zip(nets, losses, strict=True)
        ]
        for index in range(6):
            for step in steps:
                step(batch_of(index))
                assert not any(is_fake(p.grad) for net in nets for p in net.parameters())
        finals.append([p.detach() for net in nets for p in net.parameters()])
        for step in steps:
            step.close()
    torch.testing.assert_close(*finals, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_gradients", [False, True])
def test_tracing_leaves_the_gradients_of_others_alone(has_gradients: bool) -> None:
    """Those of another network, and of a part that the optimizer does not have: the same tensors, or none."""
    model, critic = make(), nn.Linear(3, 1)
    loss = generator_loss(critic)
    optimizer = torch.optim.AdamW(model.get_submodule("6").parameters(), 0.01)
    loss(model, batch_of(0)).backward()
    optimizer.step()
    leaves = [*model.parameters(), *critic.parameters()]
    if not has_gradients:
        for leaf in leaves:
            leaf.grad = None
    gradients = [leaf.grad for leaf in leaves]
    values = copy.deepcopy(gradients)
    program = trace_step(model, loss, optimizer, batch_of(0), accumulate=2)
    program.run(program.inputs)
    assert all(leaf.grad is before for leaf, before in zip(leaves, gradients, strict=True))
    torch.testing.assert_close(gradients, values, rtol=0, atol=0) if has_gradients else None


def test_a_step_that_keeps_its_tensors_is_refused() -> None:
    """A history would grow no longer; the user's list holds what it held."""
    kept: list[Tensor] = [torch.zeros(())]

    def remembering(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        kept.append(loss.detach())
        return loss + 0.1 * kept[-2]

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [*kept]
    with pytest.raises(CaptureError) as caught:
        trace_step(model, remembering, optimizer, batch_of(0))
    assert str(caught.value) == (
        "wanted a step that changes tensors only, got one that changes the length of a list in Python, which "
        "one program would never do again; do it after each training step, or use execution='compiled' or "
        "'eager'"
    )
    assert len(kept) == 1
    assert kept[0] is before[0]


@pytest.mark.parametrize(
    ("draw", "whose"), [(random.random, "Python's random module"), (np.random.rand, "NumPy")]
)
def test_a_step_that_flips_a_coin_outside_of_torch_is_refused(draw: Any, whose: str) -> None:
    """What it decides would be decided for good; the eager step then draws what it would have drawn."""

    def flipping(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * (2.0 if draw() < 0.5 else 1.0)

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seed_all(0)
    wanted = draw()
    seed_all(0)
    with pytest.raises(CaptureError, match=f"got numbers from {whose}, which one program would"):
        trace_step(model, flipping, optimizer, batch_of(0))
    assert draw() == wanted


def test_a_step_that_counts_in_python_is_refused() -> None:
    """What is shown after each step would stand still; the count goes on from where it was."""
    seen: dict[str, Any] = {"samples": 0, "steps": [1]}

    def counting(model: nn.Module, batch: Any) -> Tensor:
        seen["samples"] += len(batch["x"])
        return loss_fn(model, batch)

    def listing(model: nn.Module, batch: Any) -> Tensor:
        seen["steps"].append(1)
        return loss_fn(model, batch)

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for loss, what in ((counting, "'samples'"), (listing, "the length of a list")):
        with pytest.raises(CaptureError, match=f"got one that changes {what} in Python"):
            trace_step(model, loss, optimizer, batch_of(0))
    assert seen == {"samples": 0, "steps": [1]}


class Recurrent(nn.Module):
    """Carries its hidden state from batch to batch in an attribute, and shows a part of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 5), nn.Linear(5, 3)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = None if self.hidden is None else self.hidden.detach()
        self.hidden = self.cell(x, hidden)
        self.row = self.head.weight[0]
        return self.head(self.hidden)


def test_after_a_refusal_the_step_goes_on_as_if_it_had_not_been_tried() -> None:
    """No tensor without data stays in the model: an eager step after it is the plain loop's."""
    finals = []
    for executions in (("step-graph", "eager"), ("eager", "eager")):
        torch.manual_seed(0)
        model = Recurrent()
        optimizer = adamw(model)
        for index, execution in enumerate(executions):
            with PlannedStep(
                model, loss_fn, optimizer, Plan(execution=execution), device="cpu"
            ) as step:
                step(batch_of(2 * index))
                if execution == "step-graph":
                    with pytest.raises(CaptureError) as caught:
                        step(batch_of(1))
                elif index == 1:
                    step(batch_of(1))
        finals.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*finals, rtol=0, atol=0)
    line = "self.row = self.head.weight[0]"
    number = 1 + Path(__file__).read_text().splitlines().index(f"        {line}")
    assert str(caught.value) == (
        "wanted tensors of their own under the names that a step writes, got the memory of a parameter, a "
        f"buffer or a tensor outside in 'row' (at {Path(__file__).relative_to(Path.cwd())}:{number} in "
        "forward), which one program would not renew; put a clone there, or use execution='compiled' or "
        "'eager'"
    )


class Odd(nn.Module):
    """Keeps what it computes for short batches, for somebody to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make(dropout=0.0)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(x)
        if len(x) < 8:
            self.seen.append(scores.detach())
        return scores


def test_a_second_shape_that_cannot_be_one_program_runs_eagerly() -> None:
    """Training goes on where the usual shape has a program and the last batch of an epoch can have none."""
    with pair_of(Odd, sgd) as pair:
        for epoch in range(3):
            for index in range(3):
                pair.run(4 * epoch + index)
            pair.run(4 * epoch + 3, size=5)
        assert pair.counters()["shapes"] == 1
        assert any(
            "ran eagerly" in note and "changes model.seen (a list)" in note
            for note in pair.program.notes
        )


def test_a_step_alone_is_refused_where_one_program_has_the_gradients() -> None:
    """It would do nothing; with gradients of the script's own it trains, and so it does once all is closed."""
    with pair_of(make, adamw) as pair:
        pair.train(3, {})
        program, eager = pair.program, pair.eager
        with pytest.raises(WorkloadError) as caught:
            program.optimizer.step()
        assert str(caught.value) == (
            "wanted gradients for AdamW.step(), called between two training steps, got none in any parameter: "
            "with execution='step-graph' they stay in the step's one program; compute some with backward() "
            "before, or train with execution='eager' on all-reduce, which leaves those of the last step in "
            "`.grad`"
        )
        for step in (program, eager):
            step.optimizer.zero_grad()
            torch.manual_seed(0)
            loss_fn(step.model, batch_of(0)).backward()
            step.optimizer.step()
        program.optimizer.zero_grad()
        pair.train(2, {})
        assert "recaptures" not in pair.counters()
    program.optimizer.step()
