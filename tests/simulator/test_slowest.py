"""Steps whose collectives wait for the slowest: laws, a Monte Carlo, what is written, and what-ifs."""

import itertools
import statistics

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import LawError, MachineError
from ridgeline.machine import Machine
from ridgeline.machine.cluster import Level
from ridgeline.machine.stragglers import Stragglers, parse_stragglers
from ridgeline.plan import Plan, Sync
from ridgeline.reporting.scaling_grids import levers_grid
from ridgeline.simulator.curves.levers import levers
from ridgeline.simulator.curves.scaling import differing_as_measured, scaling_curve
from ridgeline.simulator.curves.spread import drawn_machines
from ridgeline.simulator.curves.what_if import what_if
from ridgeline.simulator.step import simulate
from strategies import machines, make_machine, make_workload, workloads

HOST = (Level(size=2, rate_bytes_per_s=1e9, latency_s=1e-6),)
COUNTS = (1, 2, 8, 64, 1024)

stragglers = st.builds(
    Stragglers,
    spread=st.floats(0.0, 0.5),
    slow=st.integers(0, 3),
    slowdown=st.floats(1.0, 3.0),
)


def on(differing: Stragglers, machine: Machine | None = None) -> Machine:
    found = machine or make_machine(dispatch_s=1e-4, latency_s=1e-4)
    return msgspec.structs.replace(found, cluster=HOST, stragglers=differing)


def steps(machine: Machine, counts: tuple[int, ...] = COUNTS) -> list[float]:
    points = scaling_curve(machine, make_workload(gradient_bytes=[4] * 4), Plan(), counts)
    return [point.step_s for point in points]


@settings(max_examples=30)
@given(stragglers)
def test_curves_rise_by_what_is_waited_for(differing: Stragglers) -> None:
    """Never below the curve of equal devices, nor below that of fewer workers; one alone waits for nobody."""
    equal, unequal = steps(on(Stragglers())), steps(on(differing))
    assert unequal[0] == equal[0]
    added = [one - other for one, other in zip(unequal, equal, strict=True)]
    assert all(more >= less - 2e-9 for less, more in itertools.pairwise(added))
    assert steps(on(Stragglers(slow=3))) == equal


@given(machines, workloads, stragglers)
def test_only_computing_is_slowed(machine, workload, differing: Stragglers) -> None:
    """Collectives take what they took; frames on the compute lane the factor of so many workers, or less to wait."""
    plan = Plan(workers=2, threads=1)
    machine = msgspec.structs.replace(machine, overlaps=())
    equal, unequal = (
        simulate(msgspec.structs.replace(machine, stragglers=one), workload, plan, details=False)
        for one in (Stragglers(), differing)
    )
    factor = differing.factor(2)
    assert equal.step_ns - 1 <= unequal.step_ns <= factor * equal.step_ns + 20
    for name in ("forward", "backward/0", "optimizer"):
        assert unequal.total_ns(name) == pytest.approx(
            factor * equal.total_ns(name), rel=2e-6, abs=2
        )
    assert unequal.total_ns("all_reduce") == equal.total_ns("all_reduce")


def test_a_step_as_drawn() -> None:
    """The mean of steps whose devices are drawn, each predicted by itself, is the step of the mean delay."""
    workload, plan = make_workload(), Plan(workers=16, threads=1)
    noise = np.random.default_rng(1)
    drawn_s = []
    for _ in range(300):
        slowest = float(np.exp(0.1 * noise.standard_normal(16) - 0.005).max())
        one = Stragglers(slow=1, slowdown=max(1.0, slowest))
        drawn_s.append(simulate(on(one), workload, plan, details=False).step_ns)
    found = simulate(on(Stragglers(spread=0.1)), workload, plan, details=False).step_ns
    assert found == pytest.approx(statistics.mean(drawn_s), rel=0.01)
    assert found > 1.1 * simulate(on(Stragglers()), workload, plan, details=False).step_ns


def test_workers_that_meet_seldom_wait_less() -> None:
    """What varies from step to step is less of four; who is slow always is waited for all the same."""
    assert Stragglers(spread=0.2).factor(64, steps=4) == Stragglers(spread=0.1).factor(64)
    slow = Stragglers(slow=1, slowdown=1.5)
    assert slow.factor(64, steps=4) == slow.factor(64) == 1.5
    workload, varying = make_workload(), on(Stragglers(spread=0.2))
    apart = Plan(workers=2, threads=1, sync=Sync(every=4))
    kept = Plan(
        workers=2, threads=1, sync=Sync(algorithm="kvstore", options={"kind": "dist_async"})
    )
    bounded = Plan(
        workers=2,
        threads=1,
        sync=Sync(algorithm="kvstore", options={"kind": "dist_async", "staleness": 4}),
    )
    for plan, factor in (
        (apart, Stragglers(spread=0.1).factor(2)),
        (kept, 1.0),
        (bounded, Stragglers(spread=0.2).factor(2)),
    ):
        equal, unequal = (
            simulate(one, workload, plan).total_ns("forward") for one in (on(Stragglers()), varying)
        )
        assert unequal == pytest.approx(factor * equal, abs=2)


def test_a_step_that_is_issued_is_slowed_too() -> None:
    """On a GPU that waits for its host, and for its replay, what the host does takes as many times as long."""
    workload = make_workload(device="cuda", gradient_bytes=[4] * 4)
    slow = Stragglers(slow=1, slowdown=1.5)
    for machine, plan in (
        (
            make_machine(device="cuda", dispatch_s=1e-2, launch_s=1e-2, latency_s=0.0),
            Plan(workers=2),
        ),
        (
            make_machine(device="cuda", rate=1e15, graph_gap_s=1e-3, latency_s=0.0),
            Plan(workers=2, execution="graph"),
        ),
    ):
        equal, unequal = (
            simulate(msgspec.structs.replace(machine, stragglers=one), workload, plan).step_ns
            for one in (Stragglers(), slow)
        )
        assert unequal == pytest.approx(1.5 * equal, rel=1e-3)


def test_encoding_is_slowed_too() -> None:
    """A CPU that encodes what its collectives carry is the same slow device; what they carry is not."""
    workload = make_workload(gradient_bytes=[1 << 20] * 4)
    plan = Plan(workers=2, threads=1, sync=Sync(compression="int8"))
    machine = make_machine(latency_s=0.0, bandwidth=1e15)
    slow = msgspec.structs.replace(machine, stragglers=Stragglers(slow=1, slowdown=1.5))
    equal, unequal = (
        simulate(one, workload, plan).total_ns("all_reduce") for one in (machine, slow)
    )
    assert equal > 1_000_000
    assert unequal == pytest.approx(1.5 * equal, rel=1e-3)


def test_what_if_all_were_alike() -> None:
    """Free, the step is that of equal devices, and no note is left; a lever asks so where devices differ."""
    workload, plan = make_workload(), Plan(workers=2, threads=1)
    machine = on(Stragglers(spread=0.1, slow=1, slowdown=1.5))
    alike = simulate(on(Stragglers()), workload, plan)
    then = simulate(what_if(machine, {"stragglers": 1e9}, workload), workload, plan)
    assert (then.step_ns, then.notes) == (alike.step_ns, alike.notes)
    half = what_if(machine, {"stragglers": 2.0}, workload).stragglers
    assert half == Stragglers(spread=0.05, slow=1, slowdown=1.25)
    *_, lever = levers(machine, workload, plan)
    assert lever.factors == {"stragglers": 1e9}
    assert lever.step_s == pytest.approx(1e-9 * alike.step_ns)
    assert levers_grid([lever], "").rows[0][0] == "stragglers free"
    for equal in (on(Stragglers()), make_machine()):
        assert len(levers(equal, workload, plan)) == 4
    assert len(levers(machine, workload, Plan())) == 4
    with pytest.raises(LawError, match="spread of stragglers"):
        what_if(machine, {"stragglers": 1e-3}, workload)


def test_what_was_taken_is_said() -> None:
    """The note names workers, factor and devices."""
    machine = on(Stragglers(spread=0.05, slow=1, slowdown=1.3))
    notes = simulate(machine, make_workload(), Plan(workers=64, threads=1)).notes
    assert notes[-1] == (
        "the slowest of 64 workers is taken to compute 1.300 times as long as one alone: devices differ as "
        "described (5.0 % from step to step, 1 of them 1.3 times as slow)"
    )
    assert str(Stragglers()) == "all alike"


def test_as_measured() -> None:
    """Devices that differ as drawn machines do; on a machine without spread all are alike."""
    workload, plan = make_workload(), Plan(workers=2, threads=1)
    machine = on(Stragglers(slow=1, slowdown=2.0))
    assert differing_as_measured(machine, workload, plan).stragglers == Stragglers()
    ceilings = tuple(
        msgspec.structs.replace(
            entry,
            rate=msgspec.structs.replace(
                entry.rate, low=0.9 * entry.rate.value, high=1.1 * entry.rate.value
            ),
        )
        for entry in machine.ceilings
    )
    wide = msgspec.structs.replace(machine, ceilings=ceilings)
    found = differing_as_measured(wide, workload, plan).stragglers
    alone = [
        simulate(one, workload, Plan(threads=2)).step_ns for one in drawn_machines(wide, 0)[1:]
    ]
    assert found == Stragglers(spread=statistics.stdev(np.log(alone)))
    assert 0.05 < found.spread < 0.3


def test_stragglers_are_written_and_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """In `machine.json`, and as text; what cannot be is refused with an example."""
    machine = on(parse_stragglers("5%, 1.3x:2"))
    assert machine.stragglers == Stragglers(spread=0.05, slow=2, slowdown=1.3)
    assert Machine.load(machine.save(tmp_path / "machine.json")) == machine
    assert parse_stragglers("1.5x:1") == Stragglers(slow=1, slowdown=1.5)
    for text in ("", "5", "-5%", "300%", "1.3x", "0.5x:1", "2000x:1", "5%,6%", "1.3x:1,1.4x:1"):
        with pytest.raises(MachineError) as caught:
            parse_stragglers(text)
        last = text.rpartition(",")[2]
        assert str(caught.value) == (
            f"wanted SPREAD% up to 200 %, FACTORx:COUNT with a factor from 1 to 1000, or one of each, got {last!r} "
            f"in the stragglers {text!r}; for example 5%,1.3x:1, devices that vary by 5 % from step to step, one "
            "of which takes 1.3 times as long"
        )
    for wrong in ({"spread": -0.1}, {"slow": -1}, {"slowdown": 0.9}):
        with pytest.raises(LawError):
            Stragglers(**wrong)
