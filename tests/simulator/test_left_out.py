"""What captured and compiled steps leave out or add: value checks, copies for attention, optimizers outside."""

import msgspec
import pytest

from chained_workloads import Builder, make_chain, tensor
from ridgeline.plan import Execution, Plan
from ridgeline.simulator.compiler.library_inputs import copied_bytes
from ridgeline.simulator.compiler.replaying import CALL_DISPATCHES
from ridgeline.simulator.pricing.value_checks import value_checks
from ridgeline.simulator.step import simulate
from ridgeline.workload import Op
from strategies import make_machine


def checked(*, is_used: bool = False) -> Builder:
    """A step that compares a tensor with 0, asks whether all are so, and reads the answer."""
    b = Builder()
    scale = b.op("forward", "elementwise", more=(tensor(b.elements, "batch"),))
    compared = b.op("forward", "elementwise", (scale,), name="aten.gt.Scalar")
    asked = b.op(
        "forward", "other", (compared,), output=tensor(1), name="aten._is_all_true.default"
    )
    b.op("forward", "other", (asked,), output=tensor(1), name="aten._local_scalar_dense.default")
    b.op("forward", "elementwise", (compared if is_used else scale,))
    return b


def test_what_only_checks_values_is_found() -> None:
    """Back to what the rest of the step takes as well; without a check nothing is."""
    assert value_checks(checked().workload()) == {1, 2, 3}
    assert value_checks(checked(is_used=True).workload()) == {2, 3}
    assert value_checks(make_chain()) == frozenset()


@pytest.mark.parametrize(
    ("execution", "is_left_out"),
    [("eager", False), ("graph", True), ("compiled", True), ("compiled+graph", True)],
)
def test_captured_and_compiled_steps_leave_checks_out(
    execution: Execution, is_left_out: bool
) -> None:
    """Eager ones have them."""
    machine = make_machine(device="cuda", rate=1e9)
    spans = simulate(machine, checked().workload(device="cuda"), Plan(execution=execution)).spans
    names = {span.name for span in spans if span.detail}
    assert ("aten._is_all_true.default" in names) is not is_left_out


def packed(maker: str) -> Builder:
    """Query, key and value taken out of one tensor that a library or a loop has made."""
    b = Builder()
    whole, part = tensor(3 * b.elements), tensor(b.elements)
    made = b.op("forward", maker, more=(tensor(b.elements, "batch"),), output=whole)
    views = [b.op("forward", "view", (made,), output=part) for _ in range(3)]
    b.op("forward", "attention", views, name="aten._scaled_dot_product_attention.default")
    return b


def is_loop(op: Op) -> bool:
    return op.family == "elementwise"


def test_attention_has_parts_of_a_loops_result_copied() -> None:
    """Three parts are read and written; a library's result is there already, and so is a whole one."""
    part = 4 * (1 << 20)
    assert copied_bytes(packed("elementwise").workload(), 4, is_loop) == 2 * 3 * part
    assert copied_bytes(packed("matmul").workload(), 4, is_loop) == 0
    b = Builder()
    made = b.op("forward", "elementwise", more=(tensor(b.elements, "batch"),))
    b.op("forward", "attention", (made,))
    assert copied_bytes(b.workload(), 1, is_loop) == 0


def test_an_optimizer_outside_is_issued_while_the_graph_runs() -> None:
    """A replayed step takes what its device takes, or what the host needs for the call and the optimizer."""
    inside = make_chain(device="cuda")
    outside = msgspec.structs.replace(inside, is_optimizer_outside=True)
    dispatch_s = 1.0
    fast = make_machine(device="cuda", rate=1e9, dispatch_s=1e-9, replay_s=1e-6)
    slow = make_machine(device="cuda", rate=1e9, dispatch_s=dispatch_s, replay_s=1e-6)
    plan = Plan(execution="graph")
    assert simulate(fast, outside, plan).step_ns == simulate(fast, inside, plan).step_ns
    issued = len(inside.phase("optimizer"))
    wanted_ns = 1e9 * (1e-6 + (issued + CALL_DISPATCHES) * dispatch_s)
    assert simulate(slow, outside, plan).step_ns == pytest.approx(wanted_ns, rel=1e-6)
    called_ns = 1e9 * (1e-6 + CALL_DISPATCHES * dispatch_s)
    assert simulate(slow, inside, plan).step_ns == pytest.approx(called_ns, rel=1e-6)


def test_an_optimizer_outside_that_reads_values_waits_for_the_graph() -> None:
    """The host learns of rows of sparse gradients when the device has found them, and issues the rest then."""
    plain = make_chain(device="cuda")
    first = next(index for index, op in enumerate(plain.ops) if op.phase == "optimizer")
    reading = msgspec.structs.replace(plain.ops[first], name="aten._coalesce.default")
    ops = (*plain.ops[:first], reading, *plain.ops[first + 1 :])
    waiting = msgspec.structs.replace(plain, ops=ops, is_optimizer_outside=True)
    hidden = msgspec.structs.replace(plain, is_optimizer_outside=True)
    machine = make_machine(device="cuda", rate=1e9, dispatch_s=1.0, replay_s=1e-6)
    plan = Plan(execution="graph")
    spans = simulate(machine, hidden, plan, details=False).spans
    graph_ns = sum(s.duration_ns for s in spans if s.name in ("forward", "backward"))
    steps_ns = [simulate(machine, load, plan).step_ns for load in (hidden, waiting)]
    assert graph_ns > 0
    assert steps_ns[1] - steps_ns[0] == pytest.approx(graph_ns, rel=1e-6)
