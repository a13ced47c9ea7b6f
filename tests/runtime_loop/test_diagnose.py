"""The diagnosis names the first operator, tensor or batch that is not finite."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.runtime.training.diagnose import find_non_finite, largest_magnitude


class Net(nn.Module):
    """A linear layer, and a head that does something."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.head = Head(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(x))


class Head(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).mean()


def test_forward_operator_is_named_with_its_module_and_range() -> None:
    """A logarithm of zero is found where it happens."""
    found = find_non_finite(Net(lambda x: torch.log(x * 0)), loss_fn, {"x": torch.ones(8, 4)})
    assert (
        found
        == "operator log in module `head` (forward) makes inf; inputs: float32[8, 4] in [0, 0]"
    )


def test_backward_operator_is_named() -> None:
    """A square root at zero is finite forward and infinite backward."""
    found = find_non_finite(Net(lambda x: torch.sqrt(x * 0)), loss_fn, {"x": torch.ones(8, 4)})
    assert found is not None
    assert found.startswith("operator div in module `head` (backward) makes inf; inputs: ")


def test_masks_of_infinity_are_no_finding() -> None:
    """Attention fills with -inf on purpose; a softmax over it stays finite, and so does the step."""

    def attend(x: Tensor) -> Tensor:
        mask = torch.ones(len(x), len(x)).triu(1).bool()
        return (x @ x.T).masked_fill(mask, float("-inf")).softmax(-1) @ x

    assert find_non_finite(Net(attend), loss_fn, {"x": torch.randn(8, 4)}) is None


def first_of(x: Tensor) -> Tensor:
    return torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "full_like": lambda x: x + torch.full_like(x, float("-inf")).triu(1),
    "full": lambda x: x + torch.full((8, 8), float("-inf")).triu(1),
    "mul": lambda x: x + torch.triu(torch.ones(8, 8) * float("-inf"), 1),
    "scatter": lambda x: x.scatter(1, first_of(x), float("-inf")),
    "scatter_": lambda x: x.clone().scatter_(1, first_of(x), float("-inf")),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0]), float("-inf")),
    "index_fill_": lambda x: x.clone().index_fill_(1, torch.tensor([0]), float("-inf")),
    "pad": lambda x: nn.functional.pad(x[:, 1:], (1, 0), value=float("-inf")),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_way_to_mask_is_no_finding(name: str) -> None:
    """An infinite number is the caller's; what makes a NaN afterwards is still found."""

    def attend(x: Tensor) -> Tensor:
        return MASKS[name](x @ x.T).softmax(-1) @ x

    def spoil(x: Tensor) -> Tensor:
        return attend(x) * (MASKS[name](x @ x.T) * 0).sum()

    batch = {"x": torch.randn(8, 4)}
    assert find_non_finite(Net(attend), loss_fn, batch) is None
    found = find_non_finite(Net(spoil), loss_fn, batch)
    assert found is not None
    assert found.startswith("operator mul in module `head` (forward) makes NaN")


def test_rows_masked_whole_are_found_at_the_softmax() -> None:
    """The operator that makes NaN of a mask is the cause, not the fill."""

    def attend(x: Tensor) -> Tensor:
        return x.masked_fill(torch.ones_like(x).bool(), float("-inf")).softmax(-1)

    found = find_non_finite(Net(attend), loss_fn, {"x": torch.randn(8, 4)})
    assert found is not None
    assert found.startswith("operator _softmax in module `head` (forward) makes NaN")


def test_bad_batch_is_named() -> None:
    """A batch that is not finite needs no run."""
    batch = {"x": torch.tensor([[1.0, float("nan"), 2.0, 3.0]])}
    found = find_non_finite(Net(torch.relu), loss_fn, batch)
    assert (
        found
        == "the batch itself: tensor ['x'] float32[1, 4] in [1.00, 3.00] with 1 of 4 values not finite"
    )


def test_bad_parameter_is_named() -> None:
    """A parameter that is already infinite is named first."""
    model = Net(torch.relu)
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.weight[0] = float("inf")
    found = find_non_finite(model, loss_fn, {"x": torch.ones(8, 4)})
    assert found == (
        "parameter fc.weight is already not finite: float32[4, 4] in [0, 0] with 4 of 16 values not finite"
    )


def test_uninitialised_memory_is_no_finding() -> None:
    """Operators that only allocate are not blamed for what lies in their memory."""

    def allocate(x: Tensor) -> Tensor:
        torch.empty(10_000).fill_(float("nan"))
        torch.empty_like(x)
        return x

    model = Net(allocate)
    assert find_non_finite(model, loss_fn, {"x": torch.ones(8, 4)}) is None
    assert model.fc.weight.grad is None


def frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


ODD = {
    "integers": torch.tensor([3, 200], dtype=torch.uint8),
    "flags": torch.tensor([True]),
    "eight bits": torch.ones(2).to(torch.float8_e4m3fn),
    "empty": torch.ones(0, 3),
}


@pytest.mark.parametrize("name", ODD)
def test_weights_that_no_norm_takes_are_finite(name: str) -> None:
    """Quantised weights and empty ones are passed over, alone and beside others; those are still looked at."""
    odd = frozen(ODD[name])
    assert largest_magnitude([odd]) == 0.0
    assert largest_magnitude([odd, torch.tensor([1.0, -2.5])]) == 2.5
    assert largest_magnitude([odd, torch.tensor([1.0, -torch.inf])]) == torch.inf
    assert math.isnan(largest_magnitude([odd, torch.tensor([torch.nan, torch.inf])]))


@pytest.mark.parametrize("name", ODD)
def test_a_step_with_odd_weights_is_diagnosed(name: str) -> None:
    """They do not end the search for what is not finite."""
    model = Net(lambda x: torch.log(x * 0))
    model.register_parameter("odd", frozen(ODD[name]))
    found = find_non_finite(model, loss_fn, {"x": torch.ones(8, 4)})
    assert found is not None
    assert found.startswith("operator log in module `head` (forward) makes inf")
