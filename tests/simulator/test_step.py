"""Predicted steps: the analytic cases, the frames, and the laws of every prediction."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.machine import Quantity, Setting
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.exchange.communication import overlap_slowdown
from ridgeline.simulator.frames import step_frames
from ridgeline.simulator.pricing.pieces import copy_pieces, cut_workload
from ridgeline.simulator.replay import replay
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import MIB
from ridgeline.timeline import Timeline
from strategies import (
    machines,
    make_ceilings,
    make_machine,
    make_timeline,
    make_workload,
    timelines,
    workloads,
)

MS = 1_000_000
TWO = Plan(workers=2, threads=1)


def _buckets(*limits: int) -> Plan:
    return Plan(workers=2, threads=1, sync=Sync(bucket_bytes=limits))


def _spans(timeline: Timeline) -> dict[str, tuple[int, int]]:
    return {span.name: (span.start_ns, span.end_ns) for span in timeline.frames}


def test_a_worker_alone_is_the_sum_of_its_operators() -> None:
    """On the CPU a step is the time of its operators plus their dispatch."""
    timeline = simulate(make_machine(dispatch_s=1e-4), make_workload(), Plan())
    assert _spans(timeline) == {
        "input": (0, 0),
        "forward": (0, 4_400_000),
        "backward": (4_400_000, 12_800_000),
        "optimizer": (12_800_000, 13_400_000),
    }
    assert timeline.step_ns == 13_400_000
    assert timeline.notes == ()
    assert timeline.workers == 1


def test_a_step_traced_in_its_precision_is_priced_as_traced() -> None:
    """The variant's operators take what was measured of them; without one they are estimated."""
    machine, plan = make_machine(), Plan(precision="bf16")
    traced = make_workload(backward=[3 * MS])
    variant = msgspec.structs.replace(traced, precision="bf16")
    workload = msgspec.structs.replace(make_workload(backward=[50 * MS]), variants=(variant,))
    assert simulate(machine, workload, plan).spans == simulate(machine, traced, Plan()).spans
    plain = msgspec.structs.replace(workload, variants=())
    assert simulate(machine, workload, Plan()).spans == simulate(machine, plain, Plan()).spans
    assert simulate(machine, plain, plan).step_ns > simulate(machine, workload, plan).step_ns


def test_a_step_that_was_not_traced_in_its_precision_is_noted() -> None:
    """The operators of another precision are an assumption, except those of tf32, which has the same."""
    plain = make_workload(device="cuda")
    variant = msgspec.structs.replace(plain, precision="bf16")
    traced = msgspec.structs.replace(plain, variants=(variant,))
    note = (
        "toy was not traced in bf16: assumed to have the operators of its trace as-is; trace it with "
        "precisions=('bf16',)"
    )
    machine = make_machine(device="cuda")
    assert note in simulate(machine, plain, Plan(precision="bf16")).notes
    for workload, precision in ((traced, "bf16"), (plain, "as-is"), (plain, "tf32")):
        notes = simulate(machine, workload, Plan(precision=precision)).notes
        assert not any("traced" in text for text in notes)


@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_frames_are_exactly_those_of_the_contract(has_buffers: bool, accumulate: int) -> None:
    """Names and lanes are those of `step_frames`, each once."""
    workload = make_workload(buffer_bytes=64 if has_buffers else 0)
    plan = Plan(workers=2, threads=1, accumulate=accumulate, sync=Sync(bucket_bytes=(2 << 20,)))
    timeline = simulate(make_machine(), workload, plan)
    wanted = step_frames(workers=2, num_buckets=2, accumulate=accumulate, has_buffers=has_buffers)
    assert sorted((s.name, s.lane) for s in timeline.frames) == sorted(
        (frame.name, frame.lane) for frame in wanted
    )


def test_communication_hides_beneath_backward() -> None:
    """When every bucket but the last is reduced before the next, only the last is exposed."""
    machine = make_machine(latency_s=0.0, bandwidth=1e9)
    workload = make_workload(backward=[20 * MS] * 4, gradient_bytes=[1 << 20] * 4)
    copy_ns = 2 * (1 << 20)  # read and written at 1 GB/s
    reduce_ns = 1 << 20
    spans = _spans(simulate(machine, workload, _buckets(1 << 20)))
    assert spans["all_reduce/0"] == (
        spans["backward/0"][1],
        spans["backward/0"][1] + reduce_ns,
    )
    assert spans["backward/1"][0] == spans["backward/0"][1]
    assert spans["backward/3"][1] == 4 * MS + 80 * MS + 4 * copy_ns
    assert spans["wait"][1] - spans["wait"][0] == pytest.approx(reduce_ns, abs=2)


def test_buckets_queue_on_a_slow_link() -> None:
    """start_k = max(ready_k, end_{k-1}): a slow link exposes everything but the first wait."""
    machine = make_machine(latency_s=0.0, bandwidth=1e7)
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[1 << 20] * 4)
    spans = _spans(simulate(machine, workload, _buckets(1 << 20)))
    each = round((1 << 20) / 1e7 * 1e9)
    first = spans["all_reduce/0"][0]
    for number in range(4):
        assert spans[f"all_reduce/{number}"][1] == pytest.approx(first + (number + 1) * each, abs=5)
    assert spans["wait"][1] == spans["all_reduce/3"][1]
    assert spans["optimizer"][0] == spans["wait"][1]


def test_the_last_bucket_is_always_exposed() -> None:
    """However fast the rest, a step waits at least for the reduction of its last bucket."""
    machine = make_machine(latency_s=2e-3, bandwidth=1e12)
    timeline = simulate(machine, make_workload(), TWO)
    assert timeline.total_ns("wait") >= 2 * MS


def test_overlap_slows_both_sides() -> None:
    """Slowdown makes backward longer than without, by what the rates say."""
    workload = make_workload(backward=[50 * MS] * 2, gradient_bytes=[10_000_000] * 2)
    free = simulate(make_machine(latency_s=0.0, bandwidth=1e9), workload, _buckets(10_000_000))
    slow = simulate(
        make_machine(latency_s=0.0, bandwidth=1e9, slowdown=(1.25, 2.0)),
        workload,
        _buckets(10_000_000),
    )
    # 10 ms of communication takes 20 ms, in which computing does 16 ms: backward/1 loses 4 ms.
    before, after = (_spans(t)["backward/1"] for t in (free, slow))
    assert (after[1] - after[0]) - (before[1] - before[0]) == pytest.approx(4 * MS, rel=1e-3)
    alone = sum(s.attributes["alone_ns"] for s in slow.spans if s.detail)
    shown = sum(s.duration_ns for s in slow.spans if s.detail)
    assert shown - alone == pytest.approx(4 * MS, rel=1e-2)


def test_copies_hinder_nobody() -> None:
    """What copy engines move takes no multiprocessor; what is encoded before takes them all the same."""
    machine = make_machine(slowdown=(1.25, 2.0))
    setting = machine.overlaps[0].setting
    kernels = {"compute": 1.25, "communication": 2.0}
    for sync, wanted in (
        (Sync(), kernels),
        (Sync(algorithm="copy_engine"), {}),
        (Sync(algorithm="copy_engine", compression="int8"), kernels),
    ):
        assert overlap_slowdown(machine, setting, [1e-3], sync) == (wanted, "")


def test_overlap_is_read_at_the_length_of_the_kernels() -> None:
    """Of what was measured beside short and long kernels, that which is nearer to the step's counts."""
    machine = make_machine(latency_s=0.0, bandwidth=1e9)
    (measured,) = machine.overlaps
    entries = [
        msgspec.structs.replace(
            measured,
            kernel=Quantity.measured([kernel_s], "s"),
            communication_slowdown=Quantity.measured([slowdown], "x"),
        )
        for kernel_s, slowdown in ((1e-3, 1.0), (50e-3, 2.0))
    ]
    machine = msgspec.structs.replace(machine, overlaps=tuple(entries))
    for backward_ns, slowdown in (([2 * MS] * 10, 1.0), ([1 * MS, 40 * MS], 2.0)):
        sizes = [200_000] * len(backward_ns)
        workload = make_workload(backward=backward_ns, gradient_bytes=sizes)
        spans = _spans(simulate(machine, workload, _buckets(200_000)))
        start, end = spans["all_reduce/0"]
        assert end - start == pytest.approx(slowdown * 0.2 * MS, rel=0.02)


def test_accumulation_repeats_the_dispatch_but_not_the_work() -> None:
    """N micro-batches do the work of the whole batch and pay the dispatch n times."""
    machine, workload = make_machine(dispatch_s=1e-4), make_workload()
    once = simulate(machine, workload, Plan())
    thrice = simulate(machine, workload, Plan(accumulate=3))
    assert thrice.step_ns - once.step_ns == pytest.approx(2 * 8 * 100_000, abs=10)
    assert [s.name for s in thrice.frames][:3] == ["input", "micro/0", "micro/1"]


def test_accumulation_keeps_the_dispatch_inside_timings() -> None:
    """A timing contains its dispatch once, so a third of the batch takes more than a third of it."""
    workload = make_workload(forward=[MS], backward=[MS])
    timings = {op.key: 1e-3 for op in workload.ops}
    machine = make_machine(timings=timings, dispatch_s=1e-4)
    once = simulate(machine, workload, Plan())
    twice = simulate(machine, workload, Plan(accumulate=2))
    assert once.step_ns == 3 * MS
    assert twice.step_ns - once.step_ns == 2 * 100_000


def test_operators_are_shown_inside_their_frames() -> None:
    """Details nest in frames, carry what is known, and name their operator."""
    timeline = simulate(make_machine(), make_workload(), _buckets(1 << 20))
    frames = {s.name: s for s in timeline.frames}
    details = [s for s in timeline.spans if s.detail]
    assert {s.attributes["op"] for s in details if "op" in s.attributes} == set(range(9))
    first = details[0]
    assert (first.name, first.attributes["module"]) == ("aten.mm.default", "layer0")
    assert first.attributes["flops"] == MS
    assert first.attributes["bound"] == "compute"
    assert first.attributes["source"] == "roofline"
    for span in details:
        assert any(f.start_ns <= span.start_ns and span.end_ns <= f.end_ns for f in frames.values())
    assert not [
        s for s in simulate(make_machine(), make_workload(), TWO, details=False).spans if s.detail
    ]


def test_world_size_overrides_the_plan() -> None:
    """`world_size` is the number of workers that is simulated."""
    timeline = simulate(make_machine(), make_workload(), Plan(), world_size=2)
    assert timeline.workers == 2
    assert timeline.named("wait") is not None


def test_unused_parameters_travel_with_the_last_bucket() -> None:
    """A trainable parameter without gradient is reduced too, after backward."""
    workload = make_workload(gradient_bytes=[1 << 20] * 4)
    unused = msgspec.structs.replace(
        workload.parameters[0], name="unused", ready_op=-1, num_bytes=4 << 20
    )
    more = msgspec.structs.replace(workload, parameters=(*workload.parameters, unused))
    spans = _spans(simulate(make_machine(), more, _buckets(4 << 20)))
    assert "all_reduce/1" in spans
    assert spans["all_reduce/1"][0] >= spans["backward/1"][1]


def test_buckets_close_in_launch_order() -> None:
    """A bucket waits for those before it: what is left of one dtype closes no earlier than they do."""
    workload = make_workload(gradient_bytes=[100, 1000, 1000, 1000])
    first = msgspec.structs.replace(workload.parameters[-1], dtype="bfloat16")
    mixed = msgspec.structs.replace(workload, parameters=(*workload.parameters[:-1], first))
    cuts = cut_workload(mixed, Sync(bucket_bytes=(1000,)))
    assert [cut.num_bytes for cut in cuts] == [1000, 1000, 1000, 100]
    assert [cut.closing_op for cut in cuts] == [5, 6, 7, 7]


def test_gradients_are_copied_at_the_rate_of_all_buckets() -> None:
    """Each is small enough for a cache; what they are copied into is not, and was last touched a step ago."""
    setting = Setting(device="cpu", workers=2, threads=1)
    curve = [(2.0 * MIB, 1e12), (8.0 * MIB, 1e9)]
    machine = msgspec.structs.replace(
        make_machine(settings=[setting]), ceilings=make_ceilings(setting, 1e12, curve)
    )
    workload = make_workload(gradient_bytes=[MIB] * 4)
    one, each = (cut_workload(workload, Sync(bucket_bytes=(limit,))) for limit in (4 * MIB, MIB))
    assert [len(one), len(each)] == [1, 4]
    for cuts in (one, each):
        pieces = [p for n in range(len(cuts)) for _, p in copy_pieces(machine, setting, cuts, n)]
        assert len(pieces) == 4
        assert sum(piece.work_s for piece in pieces) == pytest.approx(8 * MIB / 1e9)


def test_assumptions_are_noted() -> None:
    """A setting, a world size or an overlap that was not measured is said in the timeline."""
    machine = make_machine(settings=[Setting(device="cpu", workers=2, threads=1)])
    machine = msgspec.structs.replace(machine, overlaps=())
    notes = simulate(machine, make_workload(), Plan(workers=4, threads=1)).notes
    assert notes == (
        "ceilings at 4 x 1 cpu threads were not measured: assumed as at 2 x 1 cpu threads",
        "all_reduce over 4 workers was not measured: assumed by the ring law from 2 workers",
        "overlap was not measured: assumed that computing and communicating do not slow each other",
    )


@settings(max_examples=50)
@given(machines, workloads, st.integers(1, 8 << 20))
def test_laws_of_every_prediction(machine, workload, limit: int) -> None:
    """Deterministic; lanes never overlap; the step is at least every lane's work; replay agrees."""
    plan = _buckets(limit)
    timeline = simulate(machine, workload, plan)
    assert timeline == simulate(machine, workload, plan)
    for lane in ("compute", "communication", "host"):
        spans = timeline.lane(lane)
        for before, after in itertools.pairwise(spans):
            assert before.end_ns <= after.start_ns
        assert timeline.step_ns >= sum(span.duration_ns for span in spans)
    assert replay(timeline).step_ns == pytest.approx(timeline.step_ns, abs=2)


def test_a_divided_update_is_shorter_and_its_parameters_come_back_exposed() -> None:
    """Each worker updates half; what was hidden behind backward is half an exchange, and the rest is behind it."""
    machine = make_machine(latency_s=0.0, bandwidth=1e12)
    plan = Plan(workers=2, threads=1, sync=Sync(algorithm="sharded", bucket_bytes=(1 << 20,)))
    timeline = simulate(machine, make_workload(), plan)
    plain = simulate(machine, make_workload(), _buckets(1 << 20))
    ours, theirs = _spans(timeline), _spans(plain)
    length = {name: end - start for name, (start, end) in (*theirs.items(), *ours.items())}
    assert length["optimizer"] * 2 == theirs["optimizer"][1] - theirs["optimizer"][0]
    assert length["sharded/0"] * 2 == pytest.approx(length["all_reduce/0"], abs=2)
    assert ours["all_gather"] == ours["wait"]  # the later of two frames of that name
    assert ours["all_gather"][0] == ours["optimizer"][1]
    assert ours["all_gather"][1] == timeline.step_ns == replay(timeline).step_ns


def test_replay_returns_the_recorded_step() -> None:
    """Recorded durations on the virtual clock give back the recorded step exactly."""
    recorded = make_timeline(
        [
            ("input", "host", 0, 5),
            ("forward", "compute", 5, 105),
            ("backward/0", "compute", 105, 155),
            ("backward/1", "compute", 155, 205),
            ("backward/2", "compute", 205, 225),
            ("all_reduce/0", "communication", 155, 255),
            ("all_reduce/1", "communication", 255, 305),
            ("wait", "compute", 225, 305),
            ("optimizer", "compute", 305, 355),
        ],
        workers=2,
    )
    assert replay(recorded).step_ns == recorded.step_ns == 355
    assert _spans(replay(recorded)) == _spans(recorded)


@given(timelines())
def test_replay_never_exceeds_the_sum_of_its_frames(timeline: Timeline) -> None:
    """Whatever was recorded, no lane waits for nothing."""
    assert replay(timeline).step_ns <= sum(s.duration_ns for s in timeline.frames)
