"""Steps whose values somebody else than torch looks at: NumPy, a log, a distribution's checks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference_models import rows, sgd
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.errors import WorkloadError
from ridgeline.tracing.refusal import WAY_OUT


def message_of(*arguments: Any) -> str:
    with pytest.raises(WorkloadError) as caught:
        rl.trace(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("look", "got"),
    [
        (lambda x: x.numpy(), ".numpy(), or a function of NumPy on a tensor,"),
        (np.asarray, ".numpy(), or a function of NumPy on a tensor,"),
        (
            lambda x: f"{x[0, 0]:.3f}",
            "a tensor given to Python or NumPy (unsupported format string passed to Tensor.__format__)",
        ),
        (
            lambda x: np.ones(3) * x,
            "a tensor given to Python or NumPy (unsupported operand type(s) for *: 'numpy.ndarray' and 'Tensor')",
        ),
    ],
)
def test_values_given_to_others_are_looks_too(look: Callable[[Tensor], Any], got: str) -> None:
    """A matcher of SciPy's, or a line of a log: torch's own words speak of classes that no script has."""
    model = nn.Linear(6, 3)

    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        look(m(b).detach())
        return m(b).mean()

    said = message_of(model, loss_fn, sgd(model), rows[0])
    assert said.startswith(
        f"wanted a step that does not look at the values of tensors, got {got} in loss_fn"
    )
    assert said.endswith(f"; keep such values as tensors, and read them after the step{WAY_OUT}")


def test_a_distribution_that_checks_values_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at what it is given, where the script looks at nothing."""
    # Torch's compiler turns these checks off in the whole process, when it is first used.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = nn.Linear(6, 3)
    for checks, args in ((True, {}), (False, {"validate_args": False})):
        prior = torch.distributions.Normal(0.0, 1.0, **args)

        def loss_fn(m: nn.Module, b: Tensor, prior: Any = prior) -> Tensor:
            return -prior.log_prob(m(b)).mean()

        if not checks:
            assert rl.trace(model, loss_fn, sgd(model), rows[0]).ops
            continue
        assert message_of(model, loss_fn, sgd(model), rows[0]).endswith(
            f"; make the distribution with validate_args=False, which leaves out its checks{WAY_OUT}"
        )
