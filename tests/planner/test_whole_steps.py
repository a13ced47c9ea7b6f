"""Operators that are held against a whole step add up to it, on the host that issues them and on a CPU."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.machine import Machine, Setting
from ridgeline.plan import Plan
from ridgeline.planner.trials import whole_steps
from ridgeline.planner.trials.whole_steps import (
    FAR,
    LONG_S,
    MOST,
    PHASES,
    held_against_step,
    is_long,
)
from ridgeline.simulator.model import model_step
from ridgeline.workload import Workload
from strategies import make_machine, make_workload, measured

factors = st.fixed_dictionaries({phase: st.floats(1.01 / MOST, 0.99 * MOST) for phase in PHASES})


def setting_for(workload: Workload, workers: int = 1) -> Setting:
    """Of so many workers of one thread."""
    threads = 1 if workload.device == "cpu" else 0
    return Setting(device=workload.device, workers=workers, threads=threads)


def machine_for(workload: Workload, *, untimed: int = 0, workers: int = 1) -> Machine:
    """One that knows what each operator takes, all but the first few; 1 ms, 10 us to issue on a GPU."""
    kind = workload.device
    keys = {op.key: 1e-3 for op in workload.ops[untimed:]}
    settings = [setting_for(workload, workers)]
    machine = make_machine(device=kind, settings=settings, timings=keys, dispatch_s=2e-6, rate=1e12)
    if kind == "cpu":
        return machine
    timings = tuple(
        msgspec.structs.replace(t, seconds=measured(1e-6, "s"), issue=measured(1e-5, "s"))
        for t in machine.timings
    )
    return msgspec.structs.replace(machine, timings=timings)


def told(machine: Machine, workload: Workload, workers: int = 1) -> dict[str, float]:
    """What the model says of the host's phases, where so many work at once and exchange nothing."""
    setting = setting_for(workload, workers)
    model = model_step(machine, workload, Plan(workers=1, threads=setting.threads), setting)
    on_gpu = workload.device == "cuda"
    return {
        phase: sum(p.host_s if on_gpu else p.lane_s for p in model.pieces[phase])
        for phase in PHASES
    }


@given(
    factors=factors,
    device=st.sampled_from(["cpu", "cuda"]),
    untimed=st.integers(0, 3),
    workers=st.integers(1, 3),
)
def test_operators_add_up_to_the_step(
    factors: dict[str, float], device: str, untimed: int, workers: int
) -> None:
    """Those that were not timed are as they were, so the others make up for them."""
    workload = make_workload(device=device)
    machine = machine_for(workload, untimed=untimed, workers=workers)
    before = told(machine, workload, workers)
    fixed = dict.fromkeys(PHASES, 0.0)
    if untimed:
        only = told(msgspec.structs.replace(machine, timings=()), workload, workers)
        fixed["forward"] = only["forward"] * untimed / 4
    seconds = {p: fixed[p] + factors[p] * (before[p] - fixed[p]) for p in PHASES}
    setting = setting_for(workload, workers)
    after = told(held_against_step(machine, workload, setting, seconds), workload, workers)
    for phase in PHASES:
        is_near = abs(seconds[phase] - before[phase]) < FAR[device] * before[phase]
        wanted = before[phase] if is_near else seconds[phase]
        assert after[phase] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_timings_the_cost_of_any_operator_is_corrected(device: str) -> None:
    """On a GPU, whose host a whole step shows; rates, and what the host takes elsewhere, stay."""
    workload = make_workload(device=device)
    setting = setting_for(workload)
    machine = make_machine(device=device, settings=[setting], dispatch_s=2e-6, rate=1e12)
    before = told(machine, workload)
    seconds = {"forward": 3.0 * before["forward"], "backward": 4.1 * before["backward"]}
    found = held_against_step(machine, workload, setting, seconds)
    assert found.ceilings == machine.ceilings
    if device == "cpu":
        assert found == machine
        return
    assert told(found, workload) == pytest.approx({**before, "forward": seconds["forward"]})
    (said,) = found.warnings
    assert "in forward where" in said
    assert said.count("too far off: left as they are") == 1


def test_phases_that_are_missed_are_named() -> None:
    """With what was done about them; one that is near is not."""
    workload = make_workload()
    seconds = {"forward": 5e-3, "backward": 12.1e-3, "optimizer": 1.01e-3}
    machine = held_against_step(machine_for(workload), workload, setting_for(workload), seconds)
    assert machine.warnings == (
        (
            "the host takes for a whole step of toy 5.00 ms in forward where its operators add up to 4.00 ms "
            "(scaled by 1.25), 12.1 ms in backward where its operators add up to 4.00 ms (too far off: left as "
            "they are)"
        ),
    )
    assert told(machine, workload) == pytest.approx(
        {"forward": 5e-3, "backward": 4e-3, "optimizer": 1e-3}
    )


def test_a_host_that_waits_is_not_held_against_its_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a queue that more kernels than it holds may have filled, or for values."""
    workload = make_workload(device="cuda")
    machine = machine_for(workload)
    setting = setting_for(workload)
    seconds = {phase: 1.5 * value for phase, value in told(machine, workload).items()}
    assert held_against_step(machine, workload, setting, seconds) != machine
    busy = tuple(msgspec.structs.replace(t, seconds=measured(2e-5, "s")) for t in machine.timings)
    busy_machine = msgspec.structs.replace(machine, timings=busy)
    assert held_against_step(busy_machine, workload, setting, seconds) != busy_machine
    with monkeypatch.context() as patch:
        patch.setattr(whole_steps, "QUEUE_LENGTH", len(workload.ops) - 1)
        assert held_against_step(busy_machine, workload, setting, seconds) == busy_machine
    waiting = msgspec.structs.replace(workload.ops[0], name="aten._local_scalar_dense.default")
    waits = msgspec.structs.replace(workload, ops=(waiting, *workload.ops[1:]))
    found = told(held_against_step(machine_for(waits), waits, setting, seconds), waits)
    assert found["forward"] == pytest.approx(told(machine_for(waits), waits)["forward"])
    assert found["backward"] == pytest.approx(seconds["backward"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_long_steps_are_known_beforehand(device: str) -> None:
    """By what their operators add up to."""
    workload = make_workload(device=device)
    machine = machine_for(workload)
    for seconds, is_so in ((0.9 * LONG_S, False), (1.1 * LONG_S, True)):
        each = measured(seconds / len(workload.ops), "s")
        timings = tuple(msgspec.structs.replace(t, seconds=each) for t in machine.timings)
        slow = msgspec.structs.replace(machine, timings=timings)
        assert is_long(slow, workload, setting_for(workload)) == is_so
