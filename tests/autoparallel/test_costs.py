"""What operations cost: measured once for equal ones, without a trace in the program's state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.autoparallel.costs import cost_key, is_capturable, measure_costs
from ridgeline.autoparallel.graphs.program import trace_program
from ridgeline.autoparallel.lanes.graph_clock import fill_of
from ridgeline.autoparallel.lanes.streams import StreamProgram
from ridgeline.autoparallel.scheduling.makespan import NodeCost
from ridgeline.autoparallel.scheduling.schedule import serial_schedule
from ridgeline.capture.split_backward import split_backward
from ridgeline.errors import ScheduleError


class NoLanes:
    """Lanes that do nothing."""

    def fork(self) -> None: ...

    def enter(self, lane: int) -> None: ...

    def wait(self, node: int) -> None: ...

    def signal(self, node: int) -> None: ...

    def join(self) -> None: ...


def test_equal_operations_are_measured_once() -> None:
    """The same operator on the same shapes has the same cost; another shape is measured by itself."""
    known: dict[str, NodeCost] = {}
    program = trace_program(
        lambda x, y: (x.exp(), (x + 1).exp(), y.exp()), (torch.ones(3), torch.ones(4))
    )
    costs = measure_costs(program, (torch.ones(3), torch.ones(4)), known=known)
    assert len(costs) == len(program.operations) == 4
    assert len(known) == 3
    assert all(cost.seconds > 0 for cost in costs)
    by_key = {
        cost_key(operation): cost for operation, cost in zip(program.operations, costs, strict=True)
    }
    assert by_key == known


def test_larger_operations_cost_more() -> None:
    """The order of measured costs is that of the work, far beyond noise."""
    x, y = torch.randn(8, 8), torch.randn(700, 700)
    costs = measure_costs(trace_program(lambda x, y: (x @ x, y @ y), (x, y)), (x, y), known={})
    assert costs[1].seconds > 10 * costs[0].seconds


def test_state_and_random_state_stay_as_they_are() -> None:
    """Running statistics, buffers that grow and the generator are untouched by measuring."""
    norm, count = nn.BatchNorm1d(4), torch.zeros(2)
    norm.train()

    def fn(x: Tensor) -> Tensor:
        count.add_(1.0)
        return nn.functional.dropout(norm(x), 0.5) * count.sum()

    x = torch.randn(5, 4)
    program = trace_program(fn, (x,))
    before = {name: value.clone() for name, value in program.state.items()}
    random = torch.get_rng_state()
    measure_costs(program, (x,), known={})
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in program.state.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("row_s", "rows_s", "fill"),
    [
        (1.0, 4.0, 1.0),
        (1.0, 1.0, 0.25),
        (1.0, 2.0, 0.5),
        (1.0, 5.0, 1.0),
        (1.0, 0.1, 0.05),
        (0.0, 0.0, 1.0),
    ],
)
def test_fill_from_rows_alone_and_side_by_side(row_s: float, rows_s: float, fill: float) -> None:
    """Rows that take turns fill the device; four that take the time of one leave three quarters of it."""
    assert fill_of(row_s, rows_s, 4) == pytest.approx(fill)


def test_what_is_random_or_on_the_host_is_not_captured() -> None:
    """Neither goes into a graph: one would move the generator at replays, the other is not on the device."""
    program = trace_program(lambda x: torch.rand_like(x) + x, (torch.ones(3),))
    assert [is_capturable(operation) for operation in program.operations] == [False, False]


def test_a_convolutions_backward_is_parted_without_a_difference() -> None:
    """Gradients of input and weight become operations of their own, with the same bits."""
    first, second = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3, bias=False)

    def fn(x: Tensor) -> list[Tensor]:
        loss = second(first(x).relu()).square().sum()
        return list(torch.autograd.grad(loss, [*first.parameters(), *second.parameters()]))

    x = torch.randn(2, 4, 9, 9)
    traced = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    want = traced(x)
    assert split_backward(traced.graph) == 0
    # The first layer's input needs no gradient: its backward stays one node.
    assert split_backward(traced.graph, devices=("cpu",)) == 1
    traced.graph.lint()
    traced.recompile()
    for got, expected in zip(traced(x), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_streams_want_the_schedule_of_the_program_and_one_gpu() -> None:
    """Another graph's schedule is refused, and so are streams for a program on the CPU."""
    program = trace_program(lambda x: x.exp() + 1, (torch.ones(3),))
    other = trace_program(lambda x: x.exp(), (torch.ones(3),))
    with pytest.raises(
        ScheduleError, match="wanted an order of all 2 nodes, each once, got 1 entries that are not"
    ):
        StreamProgram(program, serial_schedule(other.dag))
    with pytest.raises(
        ScheduleError, match="on one CUDA device for streams, got cpu; move its tensors"
    ):
        StreamProgram(program, serial_schedule(program.dag))


def test_streams_without_gradients_and_with_the_structure_of_the_function() -> None:
    """A call returns what the function returns, in the same structure, without a graph behind it."""
    weight = nn.Parameter(torch.ones(3))

    def fn(x: Tensor) -> dict[str, Any]:
        return {"y": (x * weight, 3), "z": [x.sum()]}

    program = trace_program(fn, (torch.ones(3),))
    got = StreamProgram(program, serial_schedule(program.dag), lanes=NoLanes())(torch.ones(3))
    assert got["y"][1] == 3
    assert not got["y"][0].requires_grad
    torch.testing.assert_close(got["z"][0], torch.tensor(3.0), rtol=0, atol=0)
