"""What the host pays for a compiled step that it issues: calls, parameters, gradients, libraries."""

import msgspec
import pytest

from chained_workloads import make_chain
from ridgeline.machine import Setting
from ridgeline.plan import Plan
from ridgeline.simulator.compiler.call_costs import (
    CALLS,
    GRADIENT_DISPATCHES,
    PARAMETER_DISPATCHES,
)
from ridgeline.simulator.compiler.compiled import price_execution
from strategies import make_machine, measured

GPU = Setting(device="cuda", workers=1)
DISPATCH_S = 1e-5
COMPILED = Plan(execution="compiled")


def test_a_call_hands_over_parameters_and_gradients() -> None:
    workload = make_chain(device="cuda")
    machine = make_machine(device="cuda", dispatch_s=DISPATCH_S)
    priced = price_execution(machine, workload, GPU, COMPILED)
    parameters, gradients = len(workload.parameters), len(workload.ready_order)
    assert parameters
    assert gradients
    calls = CALLS["compiled"]
    for pieces, call, more in (
        (priced.forward, calls["forward"].call, PARAMETER_DISPATCHES * parameters),
        (priced.backward, calls["backward"].call, GRADIENT_DISPATCHES * gradients),
    ):
        (found,) = (p for p in pieces if p.name.startswith("call compiled"))
        assert found.host_s == pytest.approx(DISPATCH_S * (call + more))


@pytest.mark.parametrize("issue_s", [1e-6, 1e-3])
def test_a_library_costs_the_host_what_it_costs_without_the_compiler(issue_s: float) -> None:
    """Or a kernel of a program, where that is more."""
    workload = make_chain(device="cuda")
    product = next(op for op in workload.ops if op.family == "matmul")
    machine = make_machine(device="cuda", dispatch_s=DISPATCH_S, timings={product.key: 1e-4})
    timings = tuple(
        msgspec.structs.replace(t, issue=measured(issue_s, "s")) for t in machine.timings
    )
    machine = msgspec.structs.replace(machine, timings=timings)
    priced = price_execution(machine, workload, GPU, COMPILED)
    issued = [
        p.host_s for p in priced.forward if p.op >= 0 and workload.ops[p.op].key == product.key
    ]
    least_s = DISPATCH_S * CALLS["compiled"]["forward"].kernel
    assert issued
    assert issued == pytest.approx([max(issue_s, least_s)] * len(issued))
