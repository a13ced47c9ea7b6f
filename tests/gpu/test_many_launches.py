"""Operators that launch more kernels than a queue holds are timed as a graph replays them."""

from typing import Any

import pytest
import torch
from quiet_device import holds_when_quiet
from torch import Tensor, nn

from ridgeline.probe.gpu import sleep
from ridgeline.probe.operators.captured import captured_seconds, launches_many
from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.tracing.capture import trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Tagger(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(64, 256, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(512, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def graph_seconds(model: nn.Module, batch: Any) -> float:
    """Of forward and backward, captured by hand."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(3):
            loss_fn(model, batch).backward()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        loss_fn(model, batch).backward()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        sleep(1_000_000)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return min(times)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_take_what_a_graph_of_them_takes(layer: type[nn.RNNBase]) -> None:
    """Forward and backward of 150 time steps, of which eager torch issues each kernel."""
    torch.manual_seed(0)
    model = Tagger(layer).cuda()
    batch = (torch.randn(32, 150, 64).cuda(), torch.randint(5, (32,)).cuda())
    workload = trace(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch, may_run=True
    )
    wanted = {op.key for op in workload.ops if launches_many(op)}
    assert len(wanted) == 2
    device = torch.device("cuda")
    with torch.no_grad():
        replay = WorkloadReplay(workload.ops, device, has_host=True)
        replay.run(lambda index: True)

    def wrong() -> str:
        found = captured_seconds(replay, workload.ops, device)
        assert wanted.isdisjoint(replay.failures)
        assert set(found) == wanted
        got, whole = sum(q.value for q in found.values()), graph_seconds(model, batch)
        return "" if 0.75 * whole < got < 1.1 * whole else f"{got:.3g} s for {whole:.3g}"

    holds_when_quiet(wrong)
