"""Arguments of `parallelize` in a nest, and their gradients."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.autoparallel.parallelize import parallelize
from ridgeline.errors import CaptureError


class Levels(nn.Module):
    """Feature maps by name in, and out, as those of a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, maps: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": self.first(maps["a"]).tanh(), "b": self.second(maps["b"]).tanh()}


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_arguments_in_a_dictionary_have_gradients(kind: Any) -> None:
    """The programs of forward and backward take tensors, whatever nest the caller gives."""
    net = Levels()
    maps = kind(a=torch.randn(2, 4, requires_grad=True), b=torch.randn(2, 5))
    with parallelize(net, (maps,), mode="parallel", lanes=2) as parallel:
        got, expected = parallel(maps), net(maps)
        wanted = [maps["a"], *net.parameters()]
        for name in expected:
            assert torch.equal(got[name], expected[name])
        assert parallel.report.counters == {}
        grads = [
            torch.autograd.grad(sum(map(torch.sum, r.values())), wanted) for r in (got, expected)
        ]
        assert all(map(torch.equal, *grads))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the flags themselves
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="an LSTM of oneDNN")
def test_operators_that_keep_nothing_outside_autograd_are_refused() -> None:
    """By name, with two ways out that work."""
    net, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    with pytest.raises(
        CaptureError, match=r"under autograd only .* call parallelize under torch\.no_grad"
    ):
        parallelize(net, x)
    with torch.no_grad(), parallelize(net, x) as parallel:
        assert torch.equal(parallel(x)[0], net(x)[0])
    with torch.backends.mkldnn.flags(enabled=False), parallelize(net, x) as parallel:
        torch.testing.assert_close(parallel(x)[0], net(x)[0])


def test_values_that_a_function_only_gives_on_are_those_of_the_call() -> None:
    """The traced program has them as constants; the compiler's own code would fetch them anew."""
    first, second, settings = torch.randn(4, 3), torch.randn(4, 3), {"epoch": 1, "name": "a"}

    def both(x: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return (x @ first).tanh(), (x @ second).relu(), {"at": settings["epoch"], **settings}

    x = torch.randn(2, 4)
    with parallelize(both, x, mode="parallel", lanes=2) as parallel:
        assert parallel(x)[2] == both(x)[2]
        assert parallel.report.counters == {}
        settings.update(epoch=2, name="b")
        assert parallel(x)[2] == {"at": 2, "epoch": 2, "name": "b"}


def test_a_function_that_prints_is_refused_with_a_way_out() -> None:
    """It would print when it is traced, and never again."""

    def loud(x: Tensor) -> Tensor:
        print("shape", x.shape)  # noqa: T201 - what is refused
        return x * 2

    told = r"a call of print, which the compiler does not read \(.* in loud\); do that around the call$"
    with pytest.raises(CaptureError, match=told):
        parallelize(loud, torch.ones(2))
