"""TorchScript gives results in the structure of the callable, whatever it makes of it itself."""

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.hybridize import hybridize


class Outputs(NamedTuple):
    """Of a classifier with an auxiliary head."""

    logits: Tensor
    auxiliary: Tensor | None


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)


class Named(Base):
    def forward(self, x: Tensor) -> Outputs:
        y = self.layer(x)
        return Outputs(y, self.head(y))


class Half(Base):
    def forward(self, x: Tensor) -> Outputs:
        return Outputs(self.layer(x), None)


class Ordered(Base):
    """As models of segmentation give their maps."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        result: dict[str, Tensor] = OrderedDict()
        result["out"] = self.layer(x)
        result["aux"] = self.head(result["out"])
        return result


class Asking(Base):
    """Gives more where it is scripted, as GoogLeNet does."""

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if torch.jit.is_scripting():
            return y, self.head(y)
        return y


class Counted(Base):
    def forward(self, x: Tensor) -> Any:
        return {"size": x.shape[1] - 1, "parts": [self.layer(x)]}


def counted(x: Tensor) -> Any:
    return {"parts": [x * 2.0], "name": "twice"}


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def linear_of(x: Tensor, weight: Tensor, *, count: int) -> Tensor:
    return x @ weight.t() * count


@pytest.mark.parametrize("kind", [Named, Half, Ordered, Asking, Counted])
def test_a_modules_results_keep_their_structure(kind: Any) -> None:
    """Named tuples, ordered dictionaries and constants are what they are as written; weights stay live."""
    model, x = kind(), torch.randn(2, 4)
    with hybridize(model, x, "script") as hybrid, torch.no_grad():
        for _ in range(2):
            got, expected = hybrid(x), model(x)
            assert type(got) is type(expected)
            torch.testing.assert_close(got, expected)
            model.layer.weight.add_(1.0)
        assert hybrid.report.counters == {"eager_calls": 0, "shapes": 1, "rebuilds": 0}


def test_a_functions_results_keep_their_structure() -> None:
    """Texts and lists among them, too."""
    x = torch.randn(4)
    with hybridize(counted, x, "script") as hybrid:
        got = hybrid(x + 1.0)
    assert list(got) == ["parts", "name"]
    assert got["name"] == "twice"
    assert torch.equal(got["parts"][0], (x + 1.0) * 2.0)


def test_a_partial_function_is_traced_though_it_has_no_name() -> None:
    """`functools.partial` and objects that are called are no functions to TorchScript."""
    weight = torch.ones(2, 4)
    x = torch.randn(3, 4)
    with hybridize(Scaled(2.0), x, "script") as hybrid:
        assert torch.equal(hybrid(x + 1.0), (x + 1.0) * 2.0)
    with hybridize(partial(linear_of, count=2), (x, weight), "script") as hybrid:
        assert torch.equal(hybrid(x, weight), x @ weight.t() * 2)


class Choosing(Base):
    def forward(self, x: Tensor, mask: Any, kind: str, *, times: int = 2) -> Tensor:
        y = self.layer(x) * times
        if mask is not None:
            y = y * mask
        return y.sum(0) if kind == "sum" else y


def test_arguments_that_are_no_tensors_are_constants_of_a_trace() -> None:
    """None, texts and numbers; another one is another program, and None is not a mask."""
    model, x = Choosing(), torch.randn(2, 4)
    mask = torch.tensor([1.0, 0.0, 2.0])
    with hybridize(model, (x, None, "sum"), "script", max_shapes=4) as hybrid, torch.no_grad():
        for args in ((x + 1.0, None, "sum"), (x, None, "none"), (x, mask, "sum")):
            torch.testing.assert_close(hybrid(*args), model(*args))
        assert hybrid.mode == "script"
        # A mask in place of None makes another structure of arguments, which the example does not have.
        assert hybrid.report.counters == {"eager_calls": 1, "shapes": 2, "rebuilds": 0}
