"""Tensors whose sizes are marked as changing, by their user or by a compiled program that returned them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.calls.reads import CallReads
from ridgeline.callables.hybridize import hybridize
from ridgeline.plan import Execution

MARKS = (torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic)


class Table(nn.Module):
    """Reads a table that it keeps in an attribute, and how long that is."""

    def __init__(self, mark: Callable[[Tensor, int], None]) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), torch.arange(20.0).view(5, 4)
        mark(self.table, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table.sum(0) * len(self.table) / len(x)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("mode", ["script", "compiled"])
def test_a_marked_size_is_what_it_is(mark: Callable[[Tensor, int], None], mode: Execution) -> None:
    """It ended in an AttributeError of ours; another size at the same address is another program."""
    model, x = Table(mark), torch.randn(3, 4)
    mark(x, 0)
    with hybridize(model, x, mode) as hybrid, torch.no_grad():
        torch.testing.assert_close(hybrid(x), model(x))
        model.table.data = model.table.data[:3]
        for rows in (3, 2):
            given = torch.randn(rows, 4)
            torch.testing.assert_close(hybrid(given), model(given))


@pytest.mark.parametrize("mark", MARKS)
def test_marks_change_nothing_of_what_is_read(mark: Callable[[Tensor, int], None]) -> None:
    """The same operators and tensors, and no number in their place."""
    marked, plain = (CallReads(Table(one), (torch.randn(3, 4),)) for one in (mark, lambda *_: None))
    assert marked.guards.graph == plain.guards.graph
    assert [t.shape for t in marked.tensors] == [t.shape for t in plain.tensors]


def test_what_a_compiled_program_returns_may_be_read() -> None:
    """Compiled for changing sizes, it marks them: a cache filled by a compiled step, say."""
    made = torch.compile(lambda x: x * 2.0, dynamic=True, backend="aot_eager")
    model = Table(lambda *_: None)
    model.table = made(torch.randn(5, 4))
    x = torch.randn(3, 4)
    with hybridize(model, x, "compiled") as hybrid:
        torch.testing.assert_close(hybrid(x), model(x).detach())
