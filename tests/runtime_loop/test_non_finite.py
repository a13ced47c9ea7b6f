"""The cause of a bad loss: whose is told, and in which precision it is searched for."""

import dataclasses
from pathlib import Path

import loop_tasks
import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import NonFiniteError
from ridgeline.plan import Plan, Precision
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.non_finite import explain, explained, first_cause
from ridgeline.workers.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


def test_a_cause_comes_before_a_search_that_failed() -> None:
    """Whichever worker found it; of several causes that of the first worker."""
    failed = explained(lambda: str(1 // 0))
    assert failed == (
        "no cause was found, for the search ended with ZeroDivisionError: integer division or modulo by zero"
    )
    assert first_cause(["", failed, "", "the batch", "log"]) == (3, "the batch")
    assert first_cause(["", failed, failed]) == (1, failed)


class Large(loop_tasks.Net):
    """Holds a weight that float32 can hold and bfloat16 cannot, and scales it down."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(6, 1)
        nn.init.constant_(self.large.weight, 3.4e38)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.large(x * 1e-38)


def test_what_overflows_in_the_precision_of_the_plan_is_named(tmp_path: Path) -> None:
    """The search for the cause computes as the step does: in float32 nothing would be found."""
    task = dataclasses.replace(loop_tasks.task(), model=Large)
    assert train(task, Plan(), ALONE, run_dir=tmp_path / "float32", epochs=1).history.steps
    with pytest.raises(NonFiniteError) as caught:
        train(task, Plan(precision="bf16"), ALONE, run_dir=tmp_path / "bf16", epochs=1)
    assert (
        "operator _to_copy in module `large` (forward) makes inf; inputs: float32[1, 6] in [3.4e+38, "
        "3.4e+38]"
    ) in str(caught.value)


@pytest.mark.parametrize(("precision", "how"), [("as-is", ""), ("bf16", " in bf16")])
def test_a_step_that_is_finite_again_is_told_with_its_precision(
    precision: Precision, how: str
) -> None:
    """What else may decide is the randomness of the step alone."""
    said = explain(
        loop_tasks.task(),
        loop_tasks.Net(),
        [torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)],
        seed=0,
        last_good=None,
        device=ALONE.device,
        precision=precision,
    )
    assert said == (
        f"the step is finite when run again{how}; its randomness (dropout, say) decides"
    )
