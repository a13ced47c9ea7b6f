"""What rounding decides in the callable itself is no difference of a mode, and nothing hides behind it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.calls.equivalence import compare_calls
from ridgeline.errors import EquivalenceError
from ridgeline.tensors.call_perturbation import nudge


class Means(nn.Module):
    """Its mean is nothing but rounding, of which it keeps track; its scale is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(0)
        self.mean.copy_(centred.mean(0))
        return centred * self.scale


def elsewhere(module: Means, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """The same with sums in another order."""
    centred = x - x.flip(0).double().mean(0).float()
    module.mean.copy_(centred.flip(0).double().mean(0).float())
    return centred * (module.scale if scale is None else scale)


def compared(fn: Any, candidate: Any, x: Tensor) -> Any:
    own = [*fn.parameters(), *fn.buffers()] if isinstance(fn, nn.Module) else []
    return compare_calls(fn, candidate, (x,), own)


def test_a_buffer_that_is_rounding_is_no_difference() -> None:
    """The mean of what was centred is 1e-8 in one order of additions, and another 1e-8 in another."""
    torch.manual_seed(0)
    module, x = Means(), torch.randn(37, 4) + 3.0
    outcome = compared(module, lambda x: elsewhere(module, x), x)
    assert outcome.is_equal
    assert outcome.difference > 1e-4
    (note,) = outcome.notes
    assert note == (
        f"differs from eager by {outcome.difference:.1e} in {outcome.where}, which the last bits of inputs and "
        f"parameters alone move by {outcome.rounding:.1e}"
    )


def test_a_constant_beside_rounding_is_caught() -> None:
    """What else the call gives is held to the tolerance as before."""
    torch.manual_seed(0)
    module, x = Means(), torch.randn(37, 4) + 3.0
    baked = module.scale.detach().clone()
    outcome = compared(module, lambda x: elsewhere(module, x, baked), x)
    with pytest.raises(EquivalenceError, match="something is baked into the captured program"):
        outcome.check("compiled")


def test_a_result_that_is_rounding_is_not_taken_for_equal() -> None:
    """Where last bits decide a result, every program would look right: refused with that reason."""
    torch.manual_seed(0)
    x = torch.rand(64) * 1e3 + 1.0
    outcome = compared(lambda x: (x * 1e6).sin(), lambda x: (x * 1e6 * (1 + 2e-7)).sin(), x)
    with pytest.raises(EquivalenceError) as caught:
        outcome.check("compiled")
    assert str(caught.value) == (
        f"wanted mode 'compiled' to give the results of eager, got a difference of {outcome.difference:.3g} in "
        f"{outcome.where}, which the last bits of inputs and parameters alone move by {outcome.rounding:.1e}, "
        "so that nothing can be compared; give another example (batch statistics of more samples, say), or "
        "use mode='eager'"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_nudge_moves_elements_by_last_bits(dtype: torch.dtype) -> None:
    """At most two of them, one number alike each time, and integers and shapes stay."""
    x, index = torch.linspace(1.0, 2.0, 50, dtype=dtype), torch.arange(3)
    first, second, other = x.clone(), x.clone(), x.clone()
    nudge([first, index], 1)
    nudge([second], 1)
    nudge([other], 2)
    moved = ((first.double() - x.double()) / x.double()).abs()
    assert 0 < float(moved.max()) <= 3 * torch.finfo(dtype).eps
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(index, torch.arange(3))
