"""The mean of gradients over workers that have equal ones, by the arithmetic of their type."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.engine import Engine
from ridgeline.plan import Sync
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.transports.all_reduce import AllReduce
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import World


def mean_of(gradient: Tensor, workers: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What a parameter's gradient becomes where every worker has this one."""

    def all_reduce(flat: Tensor, **_: object) -> None:
        mine = flat.clone()
        for _ in range(workers - 1):
            flat += mine

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(World, "group", lambda *_: None)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(gradient))
    world = World(0, workers, 0, torch.device("cpu"))
    with Engine() as engine:
        reducer = Reducer(
            list(model.named_parameters()),
            FlatBuffers(model),
            world=world,
            engine=engine,
            sync=Sync(bucket_bytes=(1024,)),
            transport=AllReduce(world, {}),
        )
        reducer.arm(Recorder(HostClock()))
        model.weight.backward(gradient)
        reducer.finish()
        reducer.close()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("workers", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mean_that_the_type_can_hold_does_not_overflow(
    dtype: torch.dtype, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the sum over the workers would: the mean of equal gradients is that gradient, nearly."""
    gradient = torch.tensor([torch.finfo(dtype).max, -1.0, 0.0]).to(dtype) * 0.9
    mean = mean_of(gradient, workers, monkeypatch)
    assert torch.allclose(mean, gradient, rtol=8 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("workers", [2, 3, 5, 6, 7, 8])
def test_the_mean_is_the_sum_divided_once(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 to the last bit, whatever the number of workers."""
    gradient = torch.randn(999, generator=torch.Generator().manual_seed(workers))
    total = gradient.clone()
    for _ in range(workers - 1):
        total += gradient
    assert torch.equal(mean_of(gradient, workers, monkeypatch), total / workers)
