"""Predicted steps of GPUs: launches beside kernels, and whole-step graphs."""

import msgspec
import pytest

from ridgeline.plan import Plan, Sync
from ridgeline.planner import choose
from ridgeline.simulator.frames import step_frames
from ridgeline.simulator.pricing.dataflow import spec_bytes
from ridgeline.simulator.pricing.pieces import LAUNCH_DISPATCHES, cut_workload
from ridgeline.simulator.step import simulate
from strategies import make_machine, make_workload

MS = 1_000_000


def _gpu(**more: float) -> tuple:
    machine = make_machine(device="cuda", **more)
    return machine, make_workload(device="cuda")


def test_a_busy_gpu_hides_its_launches() -> None:
    """When the device is the slower side the step is what the device does."""
    machine, workload = _gpu(dispatch_s=1e-5, launch_s=1e-5)
    timeline = simulate(machine, workload, Plan())
    assert timeline.step_ns == 12_500_000
    issuing = [s for s in timeline.spans if s.lane == "host" and s.detail]
    assert sum(s.duration_ns for s in issuing) == 9 * 10_000


def test_a_slow_host_sets_the_step() -> None:
    """When issuing takes longer than computing the step takes as long as issuing."""
    machine, workload = _gpu(dispatch_s=4e-3, launch_s=1e-3)
    timeline = simulate(machine, workload, Plan())
    assert timeline.step_ns == 9 * 4 * MS
    # Four launches of 4 ms and a kernel of 1 ms, less the 0.5 ms that the last step still ran.
    assert timeline.named("forward").duration_ns == 4 * 4 * MS + MS - MS // 2
    kernels = [s for s in timeline.spans if s.detail and s.lane == "compute"]
    assert sum(s.duration_ns for s in kernels) == 12_500_000
    assert [s.name for s in timeline.lane("compute")] == ["forward", "backward", "optimizer"]
    reached = 0
    for frame in timeline.lane("compute"):
        assert frame.start_ns == reached
        reached = frame.end_ns
    assert reached == timeline.step_ns


def test_a_slow_host_with_two_gpus() -> None:
    """Host-bound, the collectives wait for their launch, and the frames stay those of the contract."""
    machine, workload = _gpu(dispatch_s=4e-3, launch_s=1e-3)
    timeline = simulate(
        machine, workload, Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(2 << 20,)))
    )
    wanted = step_frames(workers=2, num_buckets=2)
    assert {(s.name, s.lane) for s in timeline.frames} == {(f.name, f.lane) for f in wanted}
    sending = LAUNCH_DISPATCHES * 4 * MS
    assert timeline.step_ns == pytest.approx(9 * 4 * MS + 2 * sending, rel=1e-6)
    with_buffers = msgspec.structs.replace(workload, buffer_bytes=64)
    one_bucket = Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(1 << 40,)))
    more = simulate(machine, with_buffers, one_bucket)
    assert more.step_ns == pytest.approx(timeline.step_ns, rel=1e-6), (
        "buffers cost what a bucket costs"
    )


def test_a_slow_host_sends_few_buckets() -> None:
    """Where issuing sets the step nothing is left to hide, and every bucket costs the host."""
    machine, workload = _gpu(dispatch_s=4e-3, launch_s=1e-3)
    default = Plan().sync.bucket_bytes
    larger = msgspec.structs.replace(
        workload,
        parameters=tuple(
            msgspec.structs.replace(p, num_bytes=default[0]) for p in workload.parameters
        ),
    )
    assert len(cut_workload(larger, Sync(bucket_bytes=default))) == 2
    best = choose(machine, larger, world_size=2, fixed={"execution": "eager"}).best.plan
    assert len(cut_workload(larger, best.sync)) == 1


def test_a_graph_replaces_launches_by_gaps() -> None:
    """Whole-step graph: the batch is copied, device times plus the gap of every kernel, one replay."""
    machine, workload = _gpu(dispatch_s=1e-3, launch_s=1e-3, graph_gap_s=1e-6, replay_s=1e-4)
    timeline = simulate(machine, workload, Plan(execution="graph"))
    load_ns = 2 * sum(map(spec_bytes, workload.batch))  # at 1 GB/s
    assert timeline.step_ns == 12_500_000 + 9 * 1000 + load_ns
    assert [s.name for s in timeline.spans if s.lane == "host" and s.detail] == ["issue graph"]
    slow = msgspec.structs.replace(
        machine, dispatch=make_machine(device="cuda", replay_s=1.0).dispatch
    )
    assert simulate(slow, workload, Plan(execution="graph")).step_ns == 1_000_000_000
