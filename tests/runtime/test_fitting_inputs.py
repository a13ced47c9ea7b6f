"""Inputs that depend on each other stay as they are where the step as written cannot take others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.errors import EquivalenceError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.checks.fitting_inputs import fitting_run
from ridgeline.runtime.steps.checks.perturbation import perturb_inputs
from ridgeline.runtime.steps.checks.step_difference import Outcome
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> Tensor:
        _, (hidden, _) = self.cell(packed)
        return self.out(hidden[-1])


def squared(model: nn.Module, batch: nn.utils.rnn.PackedSequence) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_packed_sequences_are_trained_on() -> None:
    """Their batch sizes add up to the length of their data, which no other ones do."""
    found = []
    for execution in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Recurrent()
        optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution=execution)
        batch = nn.utils.rnn.pack_padded_sequence(
            torch.randn(3, 5, 4), torch.tensor([5, 3, 2]), batch_first=True
        )
        with interpreted(), PlannedStep(model, squared, optimizer, plan, device="cpu") as step:
            found.append([torch.stack([step(batch) for _ in range(3)]), *model.parameters()])
            notes = step.notes
    torch.testing.assert_close(*found)
    assert notes[0].startswith(
        "whole numbers of the batch stayed as they are in the check: on others the step as written raises "
        "RuntimeError: "
    )
    assert len(notes) == 2


def fitted(run: Callable[[], Outcome], inputs: list[Tensor], shift: int) -> list[str]:
    """The notes about it, with the inputs perturbed in place."""
    originals, notes = [tensor.clone() for tensor in inputs], list[str]()
    world = World.join(device="cpu")
    fitting_run(run, inputs, originals, shift, world, notes, execution="compiled")
    return notes


@pytest.mark.parametrize("inputs", [[torch.rand(4, 2)], [torch.rand(4, 2), torch.arange(4)]])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_step_that_takes_no_numbers_raises_what_it_raises(
    inputs: list[Tensor], shift: int
) -> None:
    def run() -> Outcome:
        raise IndexError(f"shift {shift}")

    with pytest.raises(IndexError, match=f"^shift {shift}$"):
        fitted(run, inputs, shift)


def test_a_batch_stays_where_the_step_takes_no_other() -> None:
    """Boxes have a right side right of the left one: columns in place of others, or points in two places."""

    def run() -> Outcome:
        left, right = boxes.unbind(1)
        if not bool((left < right).all()):
            raise ValueError("no extent")
        return Outcome(0.0, [], [])

    boxes, classes = torch.tensor([[1.0, 2.0]]), torch.tensor([1, 2])
    notes = fitted(run, [boxes, classes], 1)
    assert (boxes.tolist(), classes.tolist()) == ([[1.0, 2.0]], [1, 2])
    assert notes == [
        "the batch stayed as it is in the check: on others the step as written raises ValueError: no extent"
    ]


def test_a_batch_stays_where_the_step_of_others_is_no_number() -> None:
    """The distance of two points in the same place has no gradient."""

    def run() -> Outcome:
        far = torch.pdist(points).min()
        return Outcome(float(far), [1.0 / far.view(1)], [])

    points = torch.eye(3)
    (note,) = fitted(run, [points], 1)
    assert note.endswith("the step as written has a loss of 0, or parameters that are no numbers")
    with pytest.raises(
        EquivalenceError, match=r"^wanted a step as written .* got one whose loss is nan "
    ):
        fitted(lambda: Outcome(float("nan"), [], []), [torch.rand(4)], 1)


def test_whole_numbers_may_stay() -> None:
    originals = [torch.rand(4, 2), torch.arange(4), torch.tensor([True, False])]
    inputs = [tensor.clone() for tensor in originals]
    perturb_inputs(inputs, originals, 1, keeps_whole=True)
    kept = [torch.equal(now, before) for now, before in zip(inputs, originals, strict=True)]
    assert kept == [False, True, True]
