"""What a full measurement finds on a GPU: its levels and knees, classes of operators, copies beside computing."""

from typing import get_args

import msgspec
import pytest
import torch
from quiet_device import holds_when_quiet

from ridgeline.machine import Setting
from ridgeline.machine.contention import ComputeFamily, Contention
from ridgeline.machine.operator_dispatch import OperatorClass
from ridgeline.probe.gpu_memory.gpu_levels import measure_blocks, measure_sizes, measure_stairs
from ridgeline.probe.gpu_memory.gpu_loops import CudaLoops
from ridgeline.probe.rates import contention, operator_dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def loops() -> CudaLoops:
    return CudaLoops()


def test_every_class_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls as on the CPU."""
    monkeypatch.setattr(operator_dispatch, "ROUNDS", 3)
    monkeypatch.setattr(operator_dispatch, "LEAST_S", 0.0)
    found = operator_dispatch.measure_operator_dispatch(torch.device("cuda", 0))
    assert [one.kind for one in found] == list(get_args(OperatorClass))
    assert {one.device for one in found} == {"cuda"}
    assert all(min(one.plain.samples) > 0.0 for one in found)


def test_copies_are_measured_beside_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the GPU and back."""
    monkeypatch.setattr(contention, "ROUNDS", 1)
    reply = contention.in_worker(msgspec.json.encode(Setting(device="cuda")))
    found = msgspec.json.decode(reply, type=tuple[Contention, ...])
    assert [(one.transfer, one.family) for one in found] == [
        (transfer, family)
        for transfer in ("host_to_device", "device_to_host")
        for family in get_args(ComputeFamily)
    ]
    assert all(one.compute_slowdown.value >= 1.0 for one in found)


@pytest.mark.quiet
def test_a_gpu_has_levels(loops: CudaLoops) -> None:
    """What fits its cache is nearer, and is read faster, than what is far larger."""

    def wrong() -> str:
        found = measure_stairs(loops)
        last, cached = found.stairs[-1], found.cached
        assert cached is not None
        assert cached.read is not None
        assert last.read is not None
        if last.num_bytes < 4 * found.cache_bytes:
            pytest.skip(f"no room for more than {last.num_bytes} bytes")
        is_nearer = found.stairs[0].access.value < 0.5 * last.access.value
        is_faster = cached.read.value > 1.2 * last.read.value
        return "" if is_nearer and is_faster else repr((found.stairs[0], cached, last))

    holds_when_quiet(wrong)


@pytest.mark.quiet
def test_more_blocks_and_larger_tensors_reach_more(loops: CudaLoops) -> None:
    """Until a knee; half of the multiprocessors are not enough for either kernel."""

    def wrong() -> str:
        blocks, sizes = measure_blocks(loops), measure_sizes(loops)
        are_curved = all(
            curve.points[0].rate.value < 0.1 * curve.best.rate.value
            and curve.knee.blocks > blocks.multiprocessors // 2
            for curve in blocks.curves
        )
        grows = sizes.points[0].rate.value < 0.9 * sizes.points[-1].rate.value
        return "" if are_curved and grows else repr((blocks, sizes))

    holds_when_quiet(wrong)
