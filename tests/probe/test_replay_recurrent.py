"""Replaying recurrent layers, whose kernels hand each other workspaces that a trace cannot size."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ridgeline.machine import Setting
from ridgeline.probe.operators.operators import time_operators
from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.tracing.capture import trace
from ridgeline.workload import Workload

CPU = torch.device("cpu")
FORWARD, BACKWARD = "aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"


class _Recurrent(nn.Module):
    def __init__(
        self, layer: type[nn.RNNBase], *, bidirectional: bool = False, width: int = 8
    ) -> None:
        super().__init__()
        self.layer = layer(width, 16, 2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(32 if bidirectional else 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def workload_of(
    layer: type[nn.RNNBase], *, bidirectional: bool = False, width: int = 8
) -> Workload:
    torch.manual_seed(0)
    model = _Recurrent(layer, bidirectional=bidirectional, width=width)
    batch = (torch.randn(4, 7, width), torch.randint(5, (4,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return trace(model, loss_fn, optimizer, batch)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_every_op_of_a_recurrent_step_is_issued(
    layer: type[nn.RNNBase], bidirectional: bool
) -> None:
    """Forward, backward and optimizer, gradients off as when operators are timed."""
    workload = workload_of(layer, bidirectional=bidirectional)
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        for _ in range(2):
            marks = replay.run(lambda index: True)
            assert replay.failures == {}
            assert sorted(marks) == list(range(len(workload.ops)))
    assert replay._values == {}


def test_no_op_reads_a_workspace_that_was_not_filled() -> None:
    """The kernel would read past its end: backward waits for a pass in which forward is issued."""
    ops = workload_of(nn.LSTM).ops
    replay = WorkloadReplay(ops, CPU)
    marks = replay.run(lambda index: ops[index].name != FORWARD)
    assert {ops[index].name for index in marks} & {FORWARD, BACKWARD} == set()
    assert replay.failures == {}
    assert {ops[index].name for index in replay.run(lambda index: True)} >= {FORWARD, BACKWARD}


def test_every_op_is_timed_where_time_is_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two equal layers each makes the workspace of its own backward, and is issued for that."""
    looks = iter(range(10**6))
    fake = SimpleNamespace(monotonic=lambda: float(next(looks)))
    monkeypatch.setattr("ridgeline.probe.operators.passes.time", fake)
    workload = workload_of(nn.LSTM, width=16)
    timed = time_operators(workload, Setting(device="cpu", workers=1, threads=1), budget_s=0.5)
    assert {timing.key for timing in timed.timings} == {op.key for op in workload.ops}
    keys = [op.key for op in workload.ops if op.name == FORWARD]
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_an_op_that_makes_fewer_tensors_than_traced_fails_alone() -> None:
    """Its readers get stand-ins; those of its workspace fail with it, and the rest of the step runs."""
    ops = workload_of(nn.LSTM).ops
    replay = WorkloadReplay(ops, CPU)
    for step in replay._program:
        if step is not None and step.op.name == FORWARD:
            object.__setattr__(step, "call", lambda *args, call=step.call: (*call(*args)[:3], None))
    marks = replay.run(lambda index: True)
    assert {op.name: replay.failures[op.key] for op in ops if op.key in replay.failures} == {
        FORWARD: "ValueError: 4 tensors were traced, 3 made",
        BACKWARD: "the op that makes its workspace or sparse tensor cannot be issued",
    }
    assert {ops[index].name for index in marks} == {op.name for op in ops} - {FORWARD, BACKWARD}
