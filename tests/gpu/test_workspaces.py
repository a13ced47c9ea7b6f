"""Workspaces of a GPU's operators: what the allocator tells of a call, and the peak of a real step."""

import gc

import msgspec
import pytest
import torch
from torch import Tensor, nn

from ridgeline.machine import Setting, Workspace
from ridgeline.plan import Plan
from ridgeline.probe.operators.clock import ReplayClock
from ridgeline.probe.operators.operators import time_operators
from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.probe.operators.workspaces import measured_workspaces
from ridgeline.simulator.memory import peak_memory_bytes
from ridgeline.tracing.capture import trace
from strategies import make_machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = Setting(device="cuda")


class _Layers(nn.Module):
    """A convolution, which takes a workspace, and products, with which cuBLAS keeps buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(64, 512, 5, padding=2)
        self.layer = nn.Linear(512, 512)
        self.head = nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.convolution(x).transpose(1, 2)))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_the_allocator_tells_what_a_product_leaves_with_cublas() -> None:
    """Its buffers are nobody's output; a sum has none. Both twice the same."""
    model, batch = nn.Linear(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    workload = trace(model, squares, torch.optim.SGD(model.parameters()), batch)
    device = torch.device("cuda", torch.cuda.current_device())
    replay = WorkloadReplay(workload.ops, device, has_host=True)
    with torch.no_grad():
        replay.run(lambda index: True)
    found, notes = measured_workspaces(replay, workload, GPU, ReplayClock(device))
    assert notes == ()
    assert measured_workspaces(replay, workload, GPU, ReplayClock(device)) == (found, ())
    by_name = {op.name: found[op.key] for op in workload.ops if op.key in found}
    assert by_name["aten.addmm.default"].library_bytes > 0
    assert by_name["aten.pow.Tensor_Scalar"] == Workspace()


def test_the_predicted_peak_is_what_the_allocator_handed_out() -> None:
    """Within 5 %, workspaces and cuBLAS's buffers of two threads included."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model, batch = _Layers().cuda(), torch.randn(64, 64, 512, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workload = trace(model, squares, optimizer, batch)
    timings = time_operators(workload, GPU, budget_s=0.05).timings
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    for _ in range(3):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        squares(model, batch).backward()
        optimizer.step()
    held = torch.cuda.max_memory_allocated() - before
    machine = msgspec.structs.replace(make_machine(device="cuda"), timings=timings)
    assert peak_memory_bytes(workload, Plan(), machine) == pytest.approx(held, rel=0.05)
    assert workload.peak_memory_bytes < 0.9 * held


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_attention_goes_back_where_its_forward_pass_was_not_issued() -> None:
    """It reads its seeds on the host, where those that stand in for the forward pass's do not lie."""
    model, batch = _Attention().cuda(), torch.randn(2, 32, 64, device="cuda")
    workload = trace(model, squares, torch.optim.SGD(model.parameters()), batch)
    names = [op.name for op in workload.ops]
    back = names.index("aten._scaled_dot_product_efficient_attention_backward.default")
    device = torch.device("cuda", torch.cuda.current_device())
    replay = WorkloadReplay(workload.ops, device, has_host=True)
    with torch.no_grad():
        assert back in replay.run(lambda index: index >= back)
        assert back in replay.run(lambda index: True)
    torch.cuda.synchronize()
    assert replay.failures == {}
