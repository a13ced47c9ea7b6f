"""What replaying costs beside kernels: the batch, the start, the call; and steps that replay their model."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chained_workloads import make_chain
from ridgeline.machine import Dispatch, Setting
from ridgeline.plan import Plan
from ridgeline.simulator.compiler.call_costs import handing
from ridgeline.simulator.compiler.compiled import price_execution
from ridgeline.simulator.compiler.fused_optimizer import BLOCK_BYTES_PER_S, CHUNK, fused_optimizer
from ridgeline.simulator.compiler.replaying import MODEL_DISPATCHES
from ridgeline.simulator.pricing.costs import Prices
from ridgeline.simulator.pricing.dataflow import spec_bytes
from ridgeline.simulator.pricing.pieces import price_step
from ridgeline.simulator.step import simulate
from strategies import make_machine, measured

GPU = Setting(device="cuda", workers=1)


def with_start(machine, seconds: float):
    start = Dispatch(device="cuda", phase="graph_start", seconds=measured(seconds, "s"))
    return msgspec.structs.replace(machine, dispatch=(*machine.dispatch, start))


@pytest.mark.parametrize("execution", ["graph", "compiled+graph", "step-graph"])
def test_a_replay_copies_its_batch_and_starts(execution) -> None:
    """Each of them adds to the step; without a batch only the start does."""
    machine, workload = make_machine(device="cuda", rate=1e9), make_chain(device="cuda")
    bare = msgspec.structs.replace(workload, batch=())
    plan = Plan(execution=execution)
    least_ns = simulate(with_start(machine, 0.0), bare, plan).step_ns
    batch_ns = 2 * sum(map(spec_bytes, workload.batch))
    got_ns = simulate(with_start(machine, 1e-3), workload, plan).step_ns
    assert got_ns == pytest.approx(least_ns + batch_ns + 1e6, abs=2)


def test_eager_steps_read_their_batch_where_it_is() -> None:
    machine, workload = make_machine(device="cuda", rate=1e9), make_chain(device="cuda")
    bare = msgspec.structs.replace(workload, batch=())
    plan = Plan(execution="eager")
    assert simulate(machine, workload, plan).step_ns == simulate(machine, bare, plan).step_ns


@given(dispatch_s=st.floats(1e-7, 1e-4))
def test_of_a_replayed_model_the_host_issues_two_replays(dispatch_s: float) -> None:
    """And hands over its parameters; what is outside of modules it issues as before."""
    machine = with_start(make_machine(device="cuda", dispatch_s=dispatch_s, launch_s=0.0), 0.0)
    workload = make_chain(device="cuda")
    inside = tuple(
        msgspec.structs.replace(op, module="" if index in (0, len(workload.ops) - 1) else "layer")
        for index, op in enumerate(workload.ops)
    )
    workload = msgspec.structs.replace(workload, ops=inside)
    eager = price_execution(machine, workload, GPU, Plan(execution="eager"))
    replayed = price_execution(machine, workload, GPU, Plan(execution="model-graph"))
    calls = 2 * MODEL_DISPATCHES + handing("forward", workload) + handing("backward", workload)
    issued_s = sum(p.host_s for p in (*replayed.forward, *replayed.backward))
    assert issued_s == pytest.approx(calls * dispatch_s)
    for one, other in ((replayed.forward, eager.forward), (replayed.backward, eager.backward)):
        assert {p.op: p.lane_s for p in one if p.op >= 0} == {p.op: p.lane_s for p in other}
    assert replayed.optimizer == eager.optimizer


def test_a_loss_outside_of_modules_is_issued_by_the_host() -> None:
    machine = with_start(make_machine(device="cuda", dispatch_s=1e-6, launch_s=0.0), 0.0)
    workload = make_chain(device="cuda")
    forward = len(workload.phase("forward"))
    outside = {forward - 1, forward}  # the last of forward, the first of backward
    ops = tuple(
        msgspec.structs.replace(op, module="" if index in outside else "layer")
        for index, op in enumerate(workload.ops)
    )
    priced = price_execution(
        machine, msgspec.structs.replace(workload, ops=ops), GPU, Plan(execution="model-graph")
    )
    issued = {p.op for p in (*priced.forward, *priced.backward) if p.host_s and p.op >= 0}
    assert issued == outside


def test_large_parameters_leave_most_of_a_gpu_idle() -> None:
    """A fused optimizer takes what its largest block takes, where the bandwidth would allow less."""
    machine = make_machine(device="cuda", rate=1e15)
    workload = make_chain((CHUNK, 8), device="cuda")
    num_bytes = 28 * sum(p.num_bytes // 4 for p in workload.gradients)
    workload = msgspec.structs.replace(workload, fused_optimizer_bytes=num_bytes)
    pieces = price_step(machine, workload, GPU).optimizer
    slow = [piece._replace(work_s=1.0) for piece in pieces]
    taken_s = fused_optimizer(Prices(machine, GPU, "as-is"), slow, workload).work_s
    assert taken_s == pytest.approx(28 * CHUNK / BLOCK_BYTES_PER_S)
    # Also where its operators, each with many blocks, would be faster.
    assert sum(piece.work_s for piece in pieces) < taken_s
    fast_s = fused_optimizer(Prices(machine, GPU, "as-is"), pieces, workload).work_s
    assert fast_s == pytest.approx(taken_s)


@pytest.mark.parametrize(
    ("tensors", "sizes", "launches"),
    [
        (4, [CHUNK] * 36, 1),
        (4, [CHUNK] * 37, 2),
        (3, [CHUNK] * 37, 1),
        (4, [319 * CHUNK, CHUNK, 1], 2),
        (4, [321 * CHUNK], 2),
        (4, [640 * CHUNK], 2),
        (4, [0, 1], 1),
    ],
)
def test_launches_hold_some_parameters_and_blocks(
    tensors: int, sizes: list[int], launches: int
) -> None:
    """Each of them takes what its largest block takes, here a whole chunk or an element."""
    machine = make_machine(device="cuda", rate=1e18)
    workload = make_chain((1, 1), device="cuda")
    some = workload.gradients[0]
    parameters = tuple(
        msgspec.structs.replace(some, name=str(n), shape=(size,)) for n, size in enumerate(sizes)
    )
    each = 4 * (2 * tensors - 1)
    workload = msgspec.structs.replace(
        workload,
        parameters=parameters,
        ready_order=tuple(p.name for p in parameters),
        fused_optimizer_bytes=each * sum(sizes),
    )
    pieces = price_step(machine, make_chain((1, 1), device="cuda"), GPU).optimizer
    taken_s = fused_optimizer(Prices(machine, GPU, "as-is"), pieces, workload).work_s
    whole = launches - (sizes[-1] == 1)
    wanted_s = each * (whole * CHUNK + (sizes[-1] == 1)) / BLOCK_BYTES_PER_S
    assert taken_s == pytest.approx(wanted_s, rel=1e-3)
