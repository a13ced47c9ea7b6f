"""Scaling curves: weak with one workload, strong with one for each number of workers."""

import pytest

from ridgeline import laws
from ridgeline.errors import PlanError
from ridgeline.plan import Plan
from ridgeline.simulator.curves.scaling import scaling_curve
from strategies import make_machine, make_workload

MS = 1_000_000


def test_scaling_curve_weak_and_strong() -> None:
    """One workload is weak scaling; a mapping is what each number of workers does."""
    machine = make_machine(latency_s=0.0, bandwidth=1e15)
    plan = Plan()
    weak = scaling_curve(machine, make_workload(gradient_bytes=[4] * 4), plan, [2, 1])
    assert [p.workers for p in weak] == [1, 2]
    assert weak[1].efficiency == pytest.approx(1.0, rel=1e-3)
    half = make_workload(
        forward=[MS // 2] * 4, backward=[MS] * 4, samples=4, gradient_bytes=[4] * 4
    )
    strong = scaling_curve(
        machine, {1: make_workload(gradient_bytes=[4] * 4), 2: half}, plan, [1, 2]
    )
    # The optimizer (0.5 of 12.5 ms) does not shrink: Amdahl.
    assert strong[1].speedup == pytest.approx(laws.amdahl(12 / 12.5, 2), rel=1e-3)


def test_scaling_curve_messages() -> None:
    """It says which number of workers it has nothing for."""
    with pytest.raises(PlanError) as error:
        scaling_curve(make_machine(), {1: make_workload()}, Plan(), [2])
    assert str(error.value) == (
        "wanted a workload for 2 workers, got workloads for [1]; trace the step with that worker's batch"
    )
    with pytest.raises(PlanError) as error:
        scaling_curve(make_machine(), make_workload(), Plan(), [])
    assert str(error.value) == (
        "wanted numbers of workers for a scaling curve, got none; give at least one"
    )
