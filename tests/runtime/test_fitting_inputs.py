"""Whole numbers that depend on each other stay as they are where the step as written cannot take others."""

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.plan import Plan
from ridgeline.runtime.steps.checks.fitting_inputs import judged
from ridgeline.runtime.steps.checks.perturbation import perturb_inputs
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


@pytest.mark.parametrize("originals", [[torch.rand(4, 2)], [torch.rand(4, 2), torch.arange(4)]])
def test_a_step_that_takes_no_other_numbers_raises_what_it_raises(originals: list[Tensor]) -> None:
    def judge(shift: int) -> None:
        raise IndexError(f"shift {shift}")

    inputs, notes = [tensor.clone() for tensor in originals], list[str]()
    world = World.join(device="cpu")
    for shift in (0, 1):
        with pytest.raises(IndexError, match=f"^shift {shift}$"):
            judged(judge, inputs, originals, shift, world, notes)
    assert notes == []


def test_whole_numbers_may_stay() -> None:
    originals = [torch.rand(4, 2), torch.arange(4), torch.tensor([True, False])]
    inputs = [tensor.clone() for tensor in originals]
    perturb_inputs(inputs, originals, 1, keeps_whole=True)
    kept = [torch.equal(now, before) for now, before in zip(inputs, originals, strict=True)]
    assert kept == [False, True, True]
