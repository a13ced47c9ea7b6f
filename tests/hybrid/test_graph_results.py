"""Results of graphs are results of the code: none is an argument's memory, of which a graph has a copy."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError


class Passing(nn.Module):
    """Gives its argument along, or a part of it."""

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(4, 4), rows

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), x if self.rows is None else x[: self.rows]


@pytest.mark.parametrize("rows", [None, 1])
def test_an_argument_among_results_is_refused(rows: int | None) -> None:
    """Who writes into such a result writes into the argument: it was another tensor, without a word."""
    model, x = Passing(rows), torch.randn(3, 4)
    with emulated_graphs():
        with pytest.raises(CaptureError, match="got one that is an argument or a view of it"):
            hybridize(model, x, "graph")
        with hybridize(model, x, "graph", static_io=True) as hybrid:  # whose results are said to be
            assert hybrid(x)[1].data_ptr() == hybrid.inputs[0].data_ptr()


def test_a_clone_of_an_argument_is_a_result() -> None:
    """As the message says."""

    def cloned(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2.0, x.clone()

    x = torch.randn(3, 4)
    with emulated_graphs(), hybridize(cloned, x, "graph") as hybrid:
        for given in (x, x + 1.0):
            torch.testing.assert_close(hybrid(given), cloned(given))


def test_inputs_kept_in_place_hold_no_graph_of_calls() -> None:
    """Arguments that want gradients are copied as numbers: calls are inference."""
    with hybridize(lambda x: x * 2, torch.ones(3), "eager", static_io=True) as hybrid:
        for _ in range(2):
            hybrid(torch.ones(3, requires_grad=True) * 3)
        assert [tensor.grad_fn for tensor in hybrid.inputs] == [None]


@pytest.mark.parametrize(
    "fn", [lambda x: x * 2.0, lambda x: (x * 2.0, (x + 1.0).t(), (x * 1j).conj())]
)
def test_results_of_inference_are_tensors_of_inference(fn: Any) -> None:
    """As those of the code: autograd may save none of them, nor may they be written outside; others it may."""
    x = torch.randn(3, 4)
    with emulated_graphs(), hybridize(fn, x, "graph") as hybrid:
        held: list[Any] = []
        with torch.inference_mode():
            for number in range(4):
                results = [pytree.tree_leaves(call(x + number)) for call in (fn, hybrid)]
                for mine, theirs in zip(*results, strict=True):
                    assert mine.is_inference()
                    assert theirs.is_inference()
                    assert mine.stride() == theirs.stride()
                    torch.testing.assert_close(mine, theirs)
                held.append((results[0], results[1]))
        for mine, theirs in held:  # no replay has written over a result that is held
            torch.testing.assert_close(mine, theirs)
        assert not any(leaf.is_inference() for leaf in pytree.tree_leaves(hybrid(x)))


def test_gradients_turned_on_inside_of_inference_are_those_of_the_code() -> None:
    """Nothing is recorded there, so the code raises; a graph made outside of it had a value."""

    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            return torch.autograd.grad(at.square().sum(), at)[0]

    x = torch.randn(3, 4)
    with emulated_graphs(), hybridize(slope, x, "graph") as hybrid:
        torch.testing.assert_close(hybrid(x), 2.0 * x)
        with torch.inference_mode():
            for call in (slope, hybrid):
                with pytest.raises(
                    RuntimeError, match="element 0 of tensors does not require grad"
                ):
                    call(x)
        assert "wanted code in inference mode that leaves gradients off" in hybrid.report.notes[0]


def test_pieces_that_turn_gradients_on_are_left_to_python_in_inference() -> None:
    weight = torch.ones(4, requires_grad=True)

    def asking(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x + weight
            y = y * (3.0 if y.requires_grad else 1.0)
            torch._dynamo.graph_break()
            return y + 1.0

    x = torch.randn(3, 4)
    with interpreted(), hybridize(asking, x, "compiled") as hybrid:
        torch.testing.assert_close(hybrid(x), asking(x).detach())
        with torch.inference_mode():
            torch.testing.assert_close(hybrid(x), asking(x))
        said = "calls in inference mode ran as written: asking ("
        assert any(said in note for note in hybrid.report.notes)
