"""A compiled step after its check: what the compiler cannot do later is refused, and nothing has run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx

from adversary.interpreting import interpreted
from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_compiler_that_fails_later_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of another shape; the next one of the first shape goes on where training was."""

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Argument 's77' was used before it has been defined")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    plan = Plan(execution="compiled")
    with interpreted(), PlannedStep(model, mean_square, optimizer, plan, device="cpu") as step:
        step(torch.randn(5, 4))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with monkeypatch.context() as patch:
            patch.setattr(compile_fx, "fx_codegen_and_compile", failing)
            with pytest.raises(CaptureError) as raised:
                step(torch.randn(6, 4))
        assert str(raised.value) == (
            "wanted execution='compiled' to compile the step again for what has changed since its check, got "
            "RuntimeError: Argument 's77' was used before it has been defined; "
            "use execution='eager'"
        )
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        step(torch.randn(5, 4))
        assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
