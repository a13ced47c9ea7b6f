"""Predicted steps of compiled modes: the hand-made cases, the laws, and what is assumed."""

import itertools
from collections.abc import Collection

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chained_workloads import chains, make_chain, on_gpu
from ridgeline.errors import PlanError
from ridgeline.machine import Machine, Setting
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.simulator.compiler.call_costs import CALLS
from ridgeline.simulator.compiler.compile_time import KIND_S, OP_S, START_S, compile_seconds
from ridgeline.simulator.compiler.compiled import price_execution
from ridgeline.simulator.compiler.made import KERNEL_RATE
from ridgeline.simulator.frames import step_frames
from ridgeline.simulator.replay import replay
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.workload import Op
from strategies import make_machine

GPU = Setting(device="cuda", workers=1)
N_NS = 4 << 20
"""A tensor of the chains at 1 GB/s."""

gpus = st.builds(
    make_machine,
    device=st.just("cuda"),
    rate=st.floats(1e8, 1e12),
    dispatch_s=st.floats(0, 1e-4),
    launch_s=st.floats(0, 1e-5),
    graph_gap_s=st.floats(0, 1e-5),
    replay_s=st.floats(0, 1e-4),
)


def _step_ns(machine: Machine, workload, execution: Execution, **more: int) -> int:
    return simulate(machine, workload, Plan(execution=execution, **more), details=False).step_ns


def test_a_fused_kernel_takes_its_bytes() -> None:
    """Each block's run of three moves two tensors instead of six, forward and backward."""
    machine, workload = make_machine(device="cuda"), make_chain((3, 3), device="cuda")
    fused_ns = 2 * N_NS / KERNEL_RATE
    spans = simulate(machine, workload, Plan(execution="compiled+graph")).spans
    fused = [s for s in spans if s.detail and s.name.startswith("fused_")]
    assert [s.duration_ns for s in fused] == [pytest.approx(fused_ns, abs=1)] * 4
    assert {s.name for s in fused} == {"fused_elementwise"}
    assert fused[0].attributes["bytes"] == 2 * N_NS
    assert (fused[0].attributes["bound"], fused[0].attributes["source"]) == ("memory", "assumed")
    eager = _step_ns(machine, workload, "graph")
    saved = eager - _step_ns(machine, workload, "compiled+graph")
    assert saved == pytest.approx(4 * (6 * N_NS - fused_ns), abs=4)
    # The optimizer's three operators a parameter move nine tensors, fused five.
    saved = _step_ns(machine, workload, "compiled+graph") - _step_ns(
        machine, workload, "step-graph"
    )
    assert saved == pytest.approx(2 * (9 * N_NS - 5 * N_NS / KERNEL_RATE), abs=4)


def test_a_captured_optimizer_is_one_kernel() -> None:
    """It takes what its fused form moves, where it has one and a GPU replays it; never more than apart."""
    chain = make_chain((3,), device="cuda")
    moved = sum(op.bytes_moved for op in chain.phase("optimizer"))
    fused = msgspec.structs.replace(chain, fused_optimizer_bytes=moved // 2)
    machine = make_machine(device="cuda")
    for execution in ("graph", "compiled+graph"):
        frames = {s.name: s for s in simulate(machine, fused, Plan(execution=execution)).frames}
        assert frames["optimizer"].duration_ns == moved // 2
        plain = {s.name: s for s in simulate(machine, chain, Plan(execution=execution)).frames}
        assert plain["optimizer"].duration_ns == moved
    assert _step_ns(machine, fused, "eager") == _step_ns(machine, chain, "eager")
    greedy = msgspec.structs.replace(chain, fused_optimizer_bytes=9 * moved)
    assert _step_ns(machine, greedy, "graph") <= _step_ns(machine, chain, "graph")


def test_fusing_saves_gaps() -> None:
    """In a replayed graph the gap of every kernel that fusing removes is saved as well."""
    workload = make_chain((3,), device="cuda")
    steps = [
        _step_ns(make_machine(device="cuda", graph_gap_s=gap), workload, "compiled+graph")
        - _step_ns(make_machine(device="cuda", graph_gap_s=gap), workload, "graph")
        for gap in (0.0, 1e-6)
    ]
    assert steps[0] - steps[1] == 4 * 1000


@given(gpus, chains)
def test_laws_of_compiled_graphs(machine: Machine, workload) -> None:
    """Fusing more is never predicted slower: graph, by region, whole, with the optimizer."""
    modes: tuple[Execution, ...] = ("graph", "regional+graph", "compiled+graph", "step-graph")
    steps = [_step_ns(machine, workload, mode) for mode in modes]
    for slower, faster in itertools.pairwise(steps):
        assert faster <= slower + 4  # rounding of frames to whole nanoseconds


@given(gpus, chains)
def test_no_kernel_beats_its_bytes(machine: Machine, workload) -> None:
    """A fused kernel takes at least its boundary bytes at the best bandwidth."""
    best = max(c.rate.value for c in machine.ceilings if c.rate.unit == "B/s")
    priced = price_execution(machine, workload, GPU, Plan(execution="step-graph"))
    for piece in (*priced.forward, *priced.backward, *priced.optimizer):
        if piece.source == "assumed" and piece.has_kernel:
            assert piece.work_s >= piece.num_bytes / best * (1 - 1e-9)
            assert piece.roofline_s <= piece.work_s


@given(gpus, chains, st.integers(1, 4))
def test_everything_is_deterministic(machine: Machine, workload, accumulate: int) -> None:
    """The same question gets the same answer, and replaying its durations gives the same step."""
    for mode in ("compiled", "regional+graph", "step-graph"):
        plan = Plan(execution=mode, accumulate=accumulate)
        timeline = simulate(machine, workload, plan)
        assert timeline == simulate(machine, workload, plan)
        assert replay(timeline).step_ns == pytest.approx(timeline.step_ns, abs=2)


def test_timings_limit_a_fused_kernel() -> None:
    """Parts that were measured faster than the bandwidth allows bound the kernel that joins them."""
    workload = on_gpu(make_chain((2,), elements=1 << 20))
    timings = {op.key: 1e-6 for op in workload.ops}
    machine = make_machine(device="cuda", timings=timings)
    priced = price_execution(machine, workload, GPU, Plan(execution="compiled"))
    fused = next(p for p in priced.forward if p.name.startswith("fused_"))
    assert fused.work_s == pytest.approx(2e-6)


def test_what_operators_compute_stays_in_a_fused_kernel() -> None:
    """On a CPU a loop saves the bytes between its parts, not their exponentials; parts that need none save all."""
    workload = make_chain((2,), elements=1 << 20)
    moved = {op.key: op.bytes_moved for op in workload.ops}
    setting, plan = Setting(device="cpu", workers=1, threads=2), Plan(execution="compiled")
    taken = []
    for computing_s in (0.0, 1e-3):
        timings = {key: num_bytes * 1e-9 + computing_s for key, num_bytes in moved.items()}
        machine = make_machine(device="cpu", rate=1e9, timings=timings)
        priced = price_execution(machine, workload, setting, plan)
        taken += [p.work_s for p in priced.forward if p.name.startswith("fused_")]
    assert taken == [pytest.approx(2 * N_NS * 1e-9), pytest.approx(2 * N_NS * 1e-9 + 2e-3)]


def test_host_cost_of_compiled_programs() -> None:
    """On a CPU a program pays its call and each kernel, the optimizer its dispatches as before."""
    machine, workload = make_machine(dispatch_s=1e-3, rate=1e15), make_chain((2,))
    ms = 1_000_000
    eager = simulate(machine, workload, Plan())
    assert [s.duration_ns // ms for s in eager.lane("compute")] == [3, 4, 3]
    compiled = simulate(machine, workload, Plan(execution="compiled"))
    forward, backward, optimizer = (s.duration_ns / ms for s in compiled.lane("compute"))
    calls = CALLS["compiled"]
    assert forward == pytest.approx(calls["forward"].call + 2 * calls["forward"].kernel, rel=1e-3)
    assert backward == pytest.approx(
        calls["backward"].call + 3 * calls["backward"].kernel, rel=1e-3
    )
    assert optimizer == pytest.approx(3, rel=1e-3)
    details = {s.name: s for s in compiled.spans if s.detail}
    assert details["call compiled forward"].attributes["bound"] == "dispatch"
    whole = _step_ns(machine, workload, "step-graph") / ms
    calls = CALLS["step-graph"]
    assert whole == pytest.approx(calls["forward"].call + 6 * calls["forward"].kernel, rel=1e-3)
    assert _step_ns(machine, workload, "packaged") < whole * ms


def test_regions_pay_a_call_each() -> None:
    """Every block is called by itself in forward and in backward; what lies outside runs as it is."""
    machine = make_machine(dispatch_s=1e-3, rate=1e15)
    timeline = simulate(machine, make_chain((1, 1, 1)), Plan(execution="regional"))
    calls = [s.attributes["module"] for s in timeline.spans if s.name.startswith("call compiled")]
    # A region is called where its first operator stands: backward begins with the activation.
    assert calls == [
        "layers.0.linear", "layers.1.linear", "layers.2.linear",
        "layers.2.act", "layers.1.act", "layers.0.act",
    ]  # fmt: skip


@pytest.mark.parametrize("execution", ["eager", "compiled", "regional"])
def test_gradients_leave_before_backward_is_over(execution: Execution) -> None:
    """A step that is compiled whole is cut where buckets end, and pays a call for each part more."""
    machine, workload = (
        make_machine(latency_s=0.0, dispatch_s=1e-6),
        make_chain((1,) * 6, elements=1 << 18),
    )

    def spans(limit: int) -> tuple[Timeline, int, int]:
        sync = Sync(bucket_bytes=(limit,))
        plan = Plan(execution=execution, workers=2, threads=1, sync=sync)
        timeline = simulate(machine, workload, plan)
        operators = [
            s.end_ns for s in timeline.spans if s.detail and s.name == "aten.matmul.default"
        ]
        return timeline, timeline.named("all_reduce/0").start_ns, max(operators)

    cut, first, last = spans(1 << 20)
    assert first < last
    wanted = step_frames(workers=2, num_buckets=6, execution=execution)
    assert sorted(s.name for s in cut.frames) == sorted(f.name for f in wanted)
    whole, first, last = spans(6 << 20)
    assert first >= last or execution != "compiled"
    note = (
        "assumed: a forward pass that is compiled in parts, one for each bucket of gradients, has the kernels "
        "of one that is compiled whole, and calls one program more for each"
    )
    assert (note in cut.notes, note in whole.notes) == (execution == "compiled", False)
    if execution == "compiled":
        calls = [
            [s.name for s in timeline.spans if s.name.startswith("call compiled")]
            for timeline in (cut, whole)
        ]
        assert calls[1] == ["call compiled forward", "call compiled backward"]
        assert sorted(calls[0]) == sorted(6 * calls[1])


def test_a_step_whose_programs_cost_much_to_call_is_not_cut() -> None:
    """What parts hide is weighed against what calling them costs: one program is quicker here, parts there."""
    workload = make_chain((1,) * 6, elements=1 << 18)

    def steps_ns(dispatch_s: float) -> list[int]:
        machine = make_machine(latency_s=0.0, bandwidth=1e9, dispatch_s=dispatch_s)
        plan = Plan(execution="compiled", workers=2, threads=1)
        syncs = [Sync(bucket_bytes=(limit << 20,)) for limit in (1, 6)]
        return [
            simulate(machine, workload, msgspec.structs.replace(plan, sync=sync)).step_ns
            for sync in syncs
        ]

    in_parts, in_one = steps_ns(1e-7)
    assert in_parts < in_one
    in_parts, in_one = steps_ns(1e-2)
    assert in_parts > in_one


def test_gradients_of_a_replayed_backward_leave_when_they_are_ready() -> None:
    """A GPU that replays a compiled step is told of each by an event: transfers hide behind backward."""
    machine = make_machine(device="cuda", latency_s=0.0)
    workload = make_chain((1,) * 6, elements=1 << 18, device="cuda")
    sync = Sync(bucket_bytes=(1 << 20,))
    plan = Plan(execution="compiled+graph", workers=2, sync=sync)
    timeline = simulate(machine, workload, plan)
    operators = [s.end_ns for s in timeline.spans if s.detail and s.name == "aten.matmul.default"]
    assert timeline.named("all_reduce/0").start_ns < max(operators)
    assert not any("at its end" in note for note in timeline.notes)


@pytest.mark.parametrize("execution", ["step-graph", "packaged"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_program_is_one_frame(execution: Execution, accumulate: int) -> None:
    """A step that is one program has nothing between waiting for its batch and its end."""
    plan = Plan(execution=execution, accumulate=accumulate)
    timeline = simulate(make_machine(), make_chain((2, 2)), plan)
    assert [(s.name, s.lane) for s in timeline.frames] == [("input", "host"), ("step", "compute")]
    frames = step_frames(
        workers=1, num_buckets=0, accumulate=accumulate, execution=execution, has_buffers=True
    )
    assert [frame.name for frame in frames] == ["input", "step"]
    assert replay(timeline).step_ns == timeline.step_ns


def test_frames_of_one_program_are_for_one_worker() -> None:
    """One program exchanges nothing, so several workers are refused."""
    with pytest.raises(PlanError) as error:
        step_frames(workers=2, num_buckets=1, execution="step-graph")
    assert str(error.value) == (
        "wanted workers=1 for execution='step-graph', got workers=2 in the plan; a step that is one "
        "program exchanges no gradients: use one worker, or another mode"
    )


def test_assumptions_are_stated() -> None:
    """Fusing, calls and compile time are in the notes; a step as written assumes nothing."""
    machine, workload = make_machine(), make_chain((3, 3))
    assert simulate(machine, workload, Plan()).notes == ()
    assert simulate(machine, workload, Plan(execution="compiled")).notes == (
        (
            "assumed: compiling makes 4 kernels of 12 elementwise operators, normalisations, reductions and "
            "copies between contractions, as fast as their bytes at the measured bandwidth, and what their "
            "operators were timed to compute besides"
        ),
        "assumed: calling a compiled program costs the host 20 dispatches, and each kernel in it 1.5",
        "assumed: compiling takes about 7.42 s before the first step",
    )
    unnumbered = make_chain((3, 3), is_numbered=False)
    regional = simulate(machine, unnumbered, Plan(execution="regional"))
    assert regional.notes[0] == (
        "assumed: no module path names numbered blocks, so that none is compiled by itself"
    )
    assert regional.step_ns == simulate(machine, unnumbered, Plan()).step_ns


def compiling_s(ops: Collection[Op], device: str) -> float:
    """A start, and so much for each operator that is no view, and more for each that differs from others."""
    kept = [op for op in ops if op.family != "view"]
    kinds = len({op.key for op in kept})
    return START_S[device] + len(kept) * OP_S[device] + kinds * KIND_S[device]


def test_compile_time_counts_operators() -> None:
    """Blocks of one kind once, views and eager parts never."""
    workload = make_chain((3, 3, 3))
    per_block = 4 + 5
    assert compile_seconds(workload, "eager") == compile_seconds(workload, "graph") == 0.0
    traced = [op for op in workload.ops if op.phase != "optimizer"]
    assert sum(op.family != "view" for op in traced) == 3 * per_block
    assert compile_seconds(workload, "compiled") == pytest.approx(compiling_s(traced, "cpu"))
    assert compile_seconds(workload, "compiled+graph") == compile_seconds(workload, "compiled")
    # The first block takes the batch, so it is a kind of its own.
    two = [op for op in traced if op.module.startswith(("layers.0.", "layers.1."))]
    assert sum(op.family != "view" for op in two) == 2 * per_block
    assert compile_seconds(workload, "regional") == pytest.approx(compiling_s(two, "cpu"))
    whole = compile_seconds(workload, "step-graph")
    assert whole == pytest.approx(compiling_s(workload.ops, "cpu"))
    predicted = simulate(make_machine(), workload, Plan(execution="packaged"))
    assert predicted.counters["compile_s"] == whole


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_are_made_once_for_operators_that_are_alike(device: str) -> None:
    """So much for each operator, and much more for each that differs from those before."""
    per_block = 4 + 5
    for blocks in ((3, 3), (3, 3, 3, 3, 3, 3)):
        workload = make_chain(blocks, device=device)
        compiled = [op for op in workload.ops if op.phase != "optimizer" and op.family != "view"]
        assert len({op.key for op in compiled}) < len(compiled) == len(blocks) * per_block
        assert compile_seconds(workload, "compiled") == pytest.approx(compiling_s(compiled, device))
