"""A plan that fails when training begins, though its trial did not, gives way to the next best one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from planned_candidates import make_candidate
from ridgeline.decision.revisions import without_best
from ridgeline.errors import CaptureError, EquivalenceError
from ridgeline.planner import Ranking

ERROR = EquivalenceError("wanted one thing, got another")


def ranking(*tried: tuple[str, float]) -> Ranking:
    """Of plans that took so many seconds in their trials, and one that was not tried."""
    candidates = [make_candidate(name, step_s, is_measured=True) for name, step_s in tried]
    return Ranking(candidates=(*candidates, make_candidate("packaged", 0.1)), error=0.1)


def test_the_fastest_of_the_others_that_were_tried() -> None:
    """What failed comes last, with its reason; what was never tried is not trusted with the run."""
    found = without_best(ranking(("graph", 1.0), ("eager", 3.0), ("compiled", 2.0)), ERROR)
    assert found is not None
    assert [c.plan.execution for c in found.candidates] == [
        "compiled",
        "eager",
        "packaged",
        "graph",
    ]
    assert (found.candidates[-1].measured, found.candidates[-1].failure) == (None, str(ERROR))
    (note,) = found.notes
    assert note == (
        "trained as 1 worker, compiled, since 1 worker, graph failed when training began, though its trial "
        "did not: wanted one thing, got another"
    )
    assert without_best(ranking(("graph", 1.0)), ERROR) is None
    assert without_best(None, ERROR) is None


class Harmless:
    """Would choose again, from what was known before the failure."""

    is_over = False

    def due(self, batch: Any, _num_steps: int) -> None:
        """Not yet."""


def squared(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("others", [[("eager", 2.0)], []])
def test_training_goes_on_with_it(others: list[tuple[str, float]]) -> None:
    """Every batch is trained on once; without another plan the failure is the user's to see."""

    class Failing:
        """A step whose capture does not equal the eager one, at its third batch."""

        def __init__(self, inner: Any) -> None:
            self.plan, self.inner, self.num_steps = rl.Plan(execution="graph"), inner, 0

        def __call__(self, batch: Any) -> Tensor:
            self.num_steps += 1
            if self.num_steps == 3:
                raise CaptureError("no")
            loss: Tensor = self.inner(batch)
            return loss

        def close(self) -> None:
            self.inner.close()

    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    losses: list[list[float]] = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        said: list[str] = []
        with rl.TrainStep(
            model, squared, optimizer, rl.Plan(), device="cpu", progress=said.append
        ) as step:
            if fails:
                step._step = Failing(step._step)  # type: ignore[assignment]
                step.ranking = ranking(("graph", 1.0), *others)
                step._revisions = Harmless()  # type: ignore[assignment]
            if fails and not others:
                with pytest.raises(CaptureError, match="no"):
                    [step(batch) for batch in batches]
                return
            losses.append([step(batch).item() for batch in batches])
            if fails:
                assert step.notes[0] == said[0]
                assert step._revisions is None
                assert said[0].startswith("trained as 1 worker, eager, since ")
    assert losses[0] == losses[1]
