"""Steps as one program whose batches want gradients, or whose optimizer no longer trains all that it did."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from step_pairs import STEP_GRAPH, Pair, adamw, batch_of, make, pair_of
from torch import Tensor, nn
from torch.optim import Optimizer

from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.runner import WITH_GRADIENTS


@pytest.fixture
def pair(interpreted: None) -> Iterator[Pair]:
    with pair_of() as made:
        yield made


def _gradients(pair: Pair, index: int) -> list[Tensor]:
    """Of the batch, after a step of each on a copy of it."""
    found = []
    for step in pair:
        batch = batch_of(index)
        batch["x"].requires_grad_()
        torch.manual_seed(index)
        step(batch)
        assert batch["x"].grad is not None
        found.append(batch["x"].grad)
    return found


def test_batches_that_want_gradients_get_them(pair: Pair) -> None:
    """Adversarial examples are made of these; other batches go on as one program."""
    for index in range(3):
        pair.run(index)
    for index in range(3, 5):
        torch.testing.assert_close(*_gradients(pair, index))
    pair.run(5)
    assert pair.counters()["eager_steps"] == 2
    assert WITH_GRADIENTS in pair.program.notes


def test_a_step_that_never_gets_other_batches_runs_eagerly(pair: Pair) -> None:
    """With a note, and without a program."""
    for index in range(4):
        torch.testing.assert_close(*_gradients(pair, index))
    assert "shapes" not in pair.counters()
    assert WITH_GRADIENTS in pair.program.notes


def test_parameters_that_were_taken_out_of_the_optimizer_keep_their_state(pair: Pair) -> None:
    """What trains no longer is no part of the next program, momentum or not."""
    for index in range(7):
        if index == 3:
            pair.both(lambda step: step.optimizer.param_groups[0]["params"].pop(0))
        pair.run(index)
    assert pair.counters()["recaptures"] == 1
    assert "eager_steps" not in pair.counters()
    for step in pair:
        assert len(step.optimizer.state) == len(step.optimizer.param_groups[0]["params"]) + 1


def test_sparse_buffers_are_refused_by_name() -> None:
    """A graph's adjacency, say: they have no memory that a program could be bound to."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("adjacency", torch.eye(3).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.adjacency, self.linear(x))

    model, x = Net(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, lambda m, x: m(x).square().mean(), optimizer, STEP_GRAPH) as step:
        step(x)
        with pytest.raises(CaptureError) as caught:
            step(x)
    assert str(caught.value) == (
        "wanted dense parameters, buffers and optimizer state, which one program reads and writes where they lie, "
        "got buffer 'adjacency' of layout sparse_coo; use execution='compiled' or 'eager'"
    )


def test_sparse_momentum_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with PlannedStep(model, lambda m, x: m(x).square().mean(), optimizer, STEP_GRAPH) as step:
        step(torch.tensor([1, 3]))
        with pytest.raises(CaptureError, match=r"state '0\.weight/momentum_buffer' of"):
            step(torch.tensor([1, 3]))


class Doubled(nn.Parameter):
    def doubled(self) -> Tensor:
        return self * 2.0


def test_methods_of_a_weights_own_class_are_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    model.weight = Doubled(torch.ones(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(model: Any, x: Tensor) -> Tensor:
        return (x @ model.weight.doubled().t()).square().mean() + model.bias.sum()

    with PlannedStep(model, loss, optimizer, STEP_GRAPH) as step:
        step(torch.randn(4, 3))
        with pytest.raises(
            CaptureError, match="object has no attribute 'doubled', at test_step_ch"
        ):
            step(torch.randn(4, 3))


def _half_frozen() -> nn.Module:
    model = make()
    model[4].requires_grad_(False)
    return model


def _of_trained(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)


def _release(step: PlannedStep) -> None:
    step.model[4].requires_grad_(True)  # type: ignore[index]


def _add(step: PlannedStep) -> None:
    _release(step)
    step.optimizer.add_param_group({"params": [*step.model[4].parameters()]})  # type: ignore[index]


@pytest.mark.parametrize(("optimizer", "change"), [(adamw, _release), (_of_trained, _add)])
def test_what_trains_from_the_second_step_on_has_its_state_made_first(
    optimizer: Callable[[nn.Module], Optimizer],
    change: Callable[[PlannedStep], None],
    interpreted: None,
) -> None:
    """By a step as it was written, like that of what trains from the first one on."""
    with pair_of(model=_half_frozen, optimizer=optimizer) as pair:
        pair.train(5, {1: change})
        assert pair.counters()["shapes"] == 1


def test_variables_of_the_loss_are_called_by_their_names(interpreted: None) -> None:
    """Not by the places in its closure where torch's compiler finds them."""
    kept, scale = list[Tensor](), [1.0]

    def scaled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]) * scale[0], batch["y"])

    def keeping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kept.append(scaled(model, batch).detach())
        return scaled(model, batch)

    with pair_of(loss=lambda: scaled) as pair:
        pair.program(batch_of(0))
        pair.program(batch_of(1))
        scale[0] = 1.5
        pair.program(batch_of(2))
        pair.program(batch_of(3))
        assert "compiled again because scale[0] == 1.0 no longer holds" in pair.program.notes
    with pair_of(loss=lambda: keeping) as pair:
        pair.program(batch_of(0))
        with pytest.raises(
            CaptureError, match=r"one that changes kept \(a list\), which one program"
        ):
            pair.program(batch_of(1))


@pytest.mark.parametrize("execution", ["graph", "model-graph", "step-graph"])
def test_batches_of_inference_are_refused_as_by_the_code(
    interpreted: None, execution: Execution
) -> None:
    """Autograd saves none of them; copies, which graphs and programs read, it does."""

    def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def outcomes(execution: Execution) -> list[float]:
        torch.manual_seed(0)
        model, losses = nn.Linear(4, 2), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with PlannedStep(
            model, mean_square, optimizer, Plan(execution=execution), device="cpu"
        ) as step:
            for index in range(8):
                generator = torch.Generator().manual_seed(index)
                with torch.inference_mode(mode=index in (1, 3, 7)):
                    batch = torch.randn(5, 4, generator=generator)
                if batch.is_inference():
                    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
                        step(batch)
                else:
                    losses.append(float(step(batch)))
        return losses

    with emulated_graphs():
        assert outcomes(execution) == pytest.approx(outcomes("eager"))
