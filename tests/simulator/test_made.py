"""Steps priced from what the compiler made: loops by their bytes, libraries by the trace's timings."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_programs import (
    LOOP_BYTES,
    WEIGHT,
    library,
    loop,
    make_op,
    make_step,
    program,
    small_programs,
    small_step,
)
from ridgeline.machine import Setting
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.simulator.compiler.call_costs import CALLS
from ridgeline.simulator.compiler.coverage import why_unread
from ridgeline.simulator.compiler.made import KERNEL_RATE
from ridgeline.simulator.step import simulate
from strategies import make_machine

GPU = Setting(device="cuda", workers=1)
REPLAYED = Plan(execution="compiled+graph")


def timed_ns(workload, seconds: dict[int, float], calls, **more) -> int:
    """A replayed step of one forward program, with timings of operators by their number and no batch."""
    workload = msgspec.structs.replace(workload, batch=())
    machine = make_machine(
        device="cuda", timings={workload.ops[i].key: s for i, s in seconds.items()}
    )
    programs = (program("forward", *calls),)
    return simulate(machine, workload, REPLAYED, programs=programs, **more).step_ns


def test_a_step_is_what_the_compiler_made() -> None:
    """Its kernels at their bytes, its products as the trace's were timed, whatever they are called."""
    workload = msgspec.structs.replace(small_step(), batch=())
    timings = {workload.ops[0].key: 0.25, workload.ops[4].key: 0.5}
    machine = make_machine(device="cuda", timings=timings)
    predicted = simulate(machine, workload, REPLAYED, programs=small_programs())
    loops_s = 1.5 * LOOP_BYTES / 1e9 / KERNEL_RATE
    assert predicted.step_ns == pytest.approx(1e9 * (0.75 + loops_s), rel=1e-6)
    assert predicted.counters["own_kernels"] == 2
    assert predicted.counters["own_bytes"] == 1.5 * LOOP_BYTES
    spans = {s.name: s for s in predicted.spans if s.detail}
    assert set(spans) == {"aten.addmm.default", "aten.mm.default", "triton_poi_fused_mul_relu_0"}
    assert spans["aten.addmm.default"].attributes["source"] == "timing"
    assert predicted.notes[:2] == (
        "read: the compiler made 2 kernels that move 18.0 MiB, and calls 2 operators of libraries",
        "assumed: calling a compiled program costs the host 20 dispatches, and each kernel in it 1.5",
    )


def test_without_programs_kernels_are_assumed() -> None:
    """And counted: one loop of relu and mul, one of backward."""
    predicted = simulate(make_machine(device="cuda"), small_step(), REPLAYED)
    assert predicted.counters["own_kernels"] == 3
    assert predicted.notes[0].startswith("assumed: compiling makes ")
    eager = simulate(make_machine(device="cuda"), small_step(), Plan(execution="graph"))
    assert "own_kernels" not in eager.counters


def test_the_host_pays_for_calls_of_programs() -> None:
    """Not replayed, a CPU's step has a call each way and a share of a dispatch for each kernel."""
    workload = small_step("cpu")
    dispatch_s = 1e-3
    machine = make_machine(settings=[Setting(device="cpu", workers=1, threads=2)])
    dear = make_machine(
        settings=[Setting(device="cpu", workers=1, threads=2)], dispatch_s=dispatch_s
    )
    plan = Plan(execution="compiled", threads=2)
    free_ns, dear_ns = (
        simulate(m, workload, plan, programs=small_programs()).step_ns for m in (machine, dear)
    )
    costs = CALLS["compiled"]
    wanted = sum(costs[phase].call + 2 * costs[phase].kernel for phase in ("forward", "backward"))
    assert dear_ns - free_ns == pytest.approx(1e9 * dispatch_s * wanted, rel=1e-6)
    assert free_ns == pytest.approx(1.5 * LOOP_BYTES + 2 * (1 << 20), rel=1e-6)


@given(
    sizes=st.tuples(*[st.integers(1, 64)] * 3),
    order=st.permutations(range(3)),
    batch=st.integers(1, 4),
)
def test_products_are_known_by_their_sizes(sizes, order, batch) -> None:
    """Factors may be exchanged and transposed, and one of several batches is a matrix by itself."""
    rows, inner, columns = sizes
    workload = make_step(
        [make_op("bmm", "forward", [(batch, rows, inner), (batch, inner, columns)])]
    )
    turned = [sizes[place] for place in order]
    shapes = [(batch, turned[0], turned[1]), (batch, turned[1], turned[2])]
    name = "bmm"
    if batch == 1:
        name, shapes = "mm", [shape[1:] for shape in shapes]
    assert timed_ns(workload, {0: 0.5}, [library(name, *shapes)]) == 500_000_000


def test_padded_products_are_the_same() -> None:
    """Those of 16 bits are padded to multiples of 8, and then run at the rate of others; never slower."""
    op = make_op("mm", "forward", [(60, 30), (30, 10)], dtype="bfloat16", flops=1 << 20)
    call = library("mm", (64, 32), (32, 16), dtype="bfloat16")
    assert timed_ns(make_step([op]), {0: 0.5}, [call]) == 1 << 20
    assert timed_ns(make_step([op]), {0: 1e-6}, [call]) == 1000
    single = msgspec.structs.replace(op, dtype="float32")
    missed = timed_ns(make_step([single]), {0: 0.5}, [library("mm", (64, 32), (32, 16))])
    assert missed == 2 * 64 * 32 * 16


def test_a_product_that_changed_its_precision_is_not_the_timed_one() -> None:
    """A compiled backward pass may compute in 16 bits what the eager one does in 32."""
    op = make_op("mm", "forward", [(64, 32), (32, 16)], flops=1 << 20)
    for dtype in ("bfloat16", "float64"):
        call = library("mm", (64, 32), (32, 16), dtype=dtype)
        assert timed_ns(make_step([op]), {0: 0.5}, [call]) == 2 * 64 * 32 * 16


def test_half_of_a_convolution_takes_half() -> None:
    """Gradients by image and by weight may be computed apart, the latter beside the chain."""
    shapes = [(4, 16, 6, 6), (4, 8, 6, 6), (16, 8, 3, 3)]
    arguments = '{"args": [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}, null, [true, true, false]]}'
    op = make_op(
        "convolution_backward", "forward", shapes, family="convolution", arguments=arguments
    )
    whole = library("convolution_backward", *shapes, parts=2)
    image = library("convolution_backward", *shapes, parts=1)
    weight = library("conv_weight_gradient", *shapes)
    for calls, wanted in (([whole], 1.0), ([image], 0.5), ([image, weight], 1.0)):
        assert timed_ns(make_step([op]), {0: 1.0}, calls) == pytest.approx(1e9 * wanted)


def test_attention_is_known_whichever_library_computes_it() -> None:
    """One that the trace does not have is priced by its FLOP."""
    shapes = [(2, 4, 8, 16)] * 3
    op = make_op("_scaled_dot_product_flash_attention", "forward", shapes, family="attention")
    call = library("_scaled_dot_product_cudnn_attention", *shapes)
    assert timed_ns(make_step([op]), {0: 0.5}, [call]) == 500_000_000
    assert timed_ns(small_step(), {}, [call]) == 4 * (2 * 4 * 8 * 16) * 8
    # Backward takes its gradient before and what it kept behind: two heads' sums, and random state.
    state = [(2, 4, 8), (), ()]
    call = library("_scaled_dot_product_flash_attention_backward", *shapes, *shapes, *state)
    assert timed_ns(small_step(), {}, [call]) == 10 * (2 * 4 * 8 * 16) * 8


def test_equal_operators_are_taken_in_turn() -> None:
    """So that a kernel stands where its operator did: gradients of several workers leave as they come."""
    workload = small_step()
    twice = msgspec.structs.replace(workload, ops=(*workload.ops, workload.ops[4]))
    machine = make_machine(device="cuda")
    backward = program("backward", *[library("mm", (16, 64), (64, 32)), loop()] * 2)
    programs = (small_programs()[0], backward)
    plan = Plan(execution="compiled+graph", workers=2, sync=Sync(bucket_bytes=(1,)))
    second_ns = (1 << 20) + LOOP_BYTES / KERNEL_RATE
    for ready_op, wanted_ns in ((4, second_ns), (5, 0)):
        parameter = msgspec.structs.replace(twice.parameters[0], ready_op=ready_op)
        load = msgspec.structs.replace(twice, parameters=(parameter,))
        frames = {s.name: s for s in simulate(machine, load, plan, programs=programs).frames}
        assert frames["backward/1"].duration_ns == pytest.approx(wanted_ns, rel=1e-6)


REASONS = [
    (
        "compiled",
        [program("forward", loop(), inputs=[(8, 16)])],
        "its programs take 0.0 % of the parameters, and the rest runs as it was written",
    ),
    (
        "compiled+graph",
        [program("forward", loop()), program("forward", loop(8))],
        "the step was translated more than once, and nothing tells which of its programs ran",
    ),
    ("regional", [program("forward", loop())], "its programs are called more than once a step"),
]


@pytest.mark.parametrize(("execution", "programs", "reason"), REASONS)
def test_programs_that_are_not_the_step(execution: Execution, programs, reason: str) -> None:
    """Kernels stay as assumed, and a note says why."""
    workload, plan = small_step(), Plan(execution=execution)
    assert why_unread(workload, plan, programs) == reason
    machine = make_machine(device="cuda")
    predicted = simulate(machine, workload, plan, programs=tuple(programs))
    assumed = simulate(machine, workload, plan)
    assert predicted.step_ns == assumed.step_ns
    note = f"the kernels of {execution} stay as assumed: {reason}"
    assert set(predicted.notes) - set(assumed.notes) == {note}


def test_micro_batches_are_not_the_step() -> None:
    """Their programs are smaller than the trace."""
    plan = Plan(execution="compiled", accumulate=2)
    reason = "its programs compute micro-batches, and the trace is of the whole batch"
    assert why_unread(small_step(), plan, small_programs()) == reason
    assert why_unread(small_step(), plan, ()) == ""
    assert why_unread(small_step(), Plan(execution="compiled"), small_programs()) == ""
    assert WEIGHT in small_programs()[0].inputs
