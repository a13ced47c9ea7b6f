"""Workers that train alone between exchanges: compared where allowed, chosen where that pays by much."""

from typing import Any

import msgspec
import pytest

from ridgeline.errors import PlanError
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.exchanges.exchange_table import exchange_table
from ridgeline.planner.exchanges.exchanges import UNKNOWN_LOSS
from ridgeline.planner.exchanges.rhythms import is_adaptive, known_rhythms
from ridgeline.planner.knobs import num_changes
from ridgeline.planner.trials.untimed import ASSUMED_ERROR
from ridgeline.synchronisation import LEAST_EXCHANGES, LEAST_GAIN, RHYTHMS
from ridgeline.workload import Workload
from strategies import make_machine, make_op, make_workload

MS, MIB = 1_000_000, 1 << 20
ALONE = ("local-steps",)
INTERVALS = {rhythm.every for rhythm in RHYTHMS}


def ranked(bandwidth: float = 2e6, allow: tuple[str, ...] = ALONE, **arguments: Any) -> Ranking:
    """Two workers whose step computes for 0.36 s and whose 4 MiB take `4 MiB / bandwidth`."""
    machine = make_machine(latency_s=1e-4, bandwidth=bandwidth, slowdown=(1.05, 1.0))
    workload = make_workload(
        forward=[30 * MS] * 4, backward=[60 * MS] * 4, gradient_bytes=[MIB] * 4
    )
    settings = {"world_size": 2, **arguments}
    return choose(machine, workload, allow=allow, **settings)


def intervals(ranking: Ranking) -> set[int]:
    return {c.plan.sync.every for c in ranking.candidates}


def with_optimizer(*names: str) -> Workload:
    load = make_workload()
    ops = [op for op in load.ops if op.phase != "optimizer"]
    own = [msgspec.structs.replace(make_op("optimizer", number=99), name=name) for name in names]
    return msgspec.structs.replace(load, ops=(*ops, *own))


def test_rhythms_are_compared_only_where_they_are_allowed() -> None:
    """Losses that are allowed are another matter; the permission alone allows no losses."""
    assert intervals(ranked(allow=())) == {1}
    assert intervals(ranked(allow=("compression",))) == {1}
    found = ranked()
    assert intervals(found) == {1, *INTERVALS}
    assert {c.plan.sync.compression for c in found.candidates} == {"none"}


@pytest.mark.parametrize(
    ("fixed", "wanted"),
    [
        ({"every": 1}, {1}),
        ({"every": 5}, {5}),
        ({"algorithm": "ring"}, {1, 8, 50}),
        ({"compression": "int8"}, {1, *INTERVALS}),
        ({"options": {"pieces": 2}, "algorithm": "ring"}, {1}),
    ],
)
def test_what_the_user_fixed_stays(fixed: dict[str, Any], wanted: set[int]) -> None:
    """An interval or options alone; another algorithm or compression with what goes with it."""
    found = ranked(fixed=fixed)
    assert intervals(found) == wanted
    for name in ("algorithm", "compression"):
        if name in fixed:
            assert {getattr(c.plan.sync, name) for c in found.candidates} == {fixed[name]}


def test_a_slow_link_is_worth_another_algorithm() -> None:
    """It is chosen before what sends less, and the record names what it changes and by how much it gains."""
    found = ranked(allow=("compression", *ALONE))
    best = found.best.plan
    assert (best.sync.every, best.sync.options) == (50, {"fragments": 4, "delay": 10})
    assert not best.exact
    assert found.notes[0] == (
        "workers train alone and exchange parameters every 50 steps, which is another optimisation "
        f"algorithm: streaming local SGD (Stich, ICLR 2019); {UNKNOWN_LOSS}"
    )
    choices = {choice.knob: choice for choice in best.choices}
    assert (choices["every"].value, choices["every"].origin) == ("50", "search")
    assert {a.value for a in choices["every"].alternatives} == {"1", "8", "100"}
    assert choices["options"].value == "fragments=4, delay=10"
    assert any(c.plan.sync.compression == "int8" for c in found.candidates)


def test_what_travels_late_is_encoded_where_losses_are_allowed() -> None:
    """Both permissions are needed, and the table names those that are missing."""

    def encoded(allow: tuple[str, ...]) -> set[str]:
        found = ranked(allow=allow).candidates
        return {c.plan.sync.compression for c in found if set(c.plan.sync.options) == {"delay"}}

    assert encoded(ALONE) == {"none"}
    assert encoded(("compression",)) == set()
    assert encoded(("compression", *ALONE)) == {"none", "int8"}

    def verdict(*allow: str) -> str:
        machine = make_machine(latency_s=1e-4, bandwidth=2e6)
        plan = Plan(workers=2, threads=1)
        rows = exchange_table(machine, {2: make_workload()}, plan, allow=allow)
        (row,) = [one for one in rows if one.every > 1 and one.compression == "int8"]
        return row.verdict

    assert f"needs allow=('local-steps', 'compression'): {UNKNOWN_LOSS}" in verdict()
    assert f"needs allow='compression': {UNKNOWN_LOSS}" in verdict(*ALONE)
    assert verdict("compression", *ALONE).endswith(UNKNOWN_LOSS)
    assert "needs" not in verdict("compression", *ALONE)


def test_one_large_parameter_travels_beside_more_steps() -> None:
    """It fills a fragment, for which ten steps are too few; forty hide all the parameters at once."""
    machine = make_machine(latency_s=1e-4, bandwidth=8e5, slowdown=(1.05, 1.0))
    workload = make_workload(
        forward=[30 * MS] * 4, backward=[60 * MS] * 4, gradient_bytes=[MIB] * 3 + [5 * MIB]
    )
    found = choose(machine, workload, world_size=2, allow=ALONE, fixed={"execution": "eager"})
    step_s = {
        tuple(c.plan.sync.options.items()): c.step_s
        for c in found.candidates
        if c.plan.sync.every == 50
    }
    alone_s = 4 * 0.03 + 4 * 0.06
    assert step_s[("delay", 40),] < 1.05 * alone_s < step_s[("fragments", 4), ("delay", 10)]
    assert found.best.plan.sync.options == {"delay": 40}


@pytest.mark.parametrize(("bandwidth", "is_noise"), [(2.5e7, False), (1e9, True), (1e11, True)])
def test_a_fast_link_is_not(bandwidth: float, is_noise: bool) -> None:
    """Where it gains less than by `LEAST_GAIN`, nothing is changed, be it more than noise; the reason says so."""
    found = ranked(bandwidth, fixed={"execution": "eager"})
    assert found.best.plan.sync.every == 1
    assert not any(UNKNOWN_LOSS in note for note in found.notes)
    fastest = min(found.candidates, key=lambda c: c.step_s)
    gain = 1.0 - fastest.step_s / found.best.step_s
    assert (gain <= ASSUMED_ERROR) == is_noise
    words = "less than the 20.0 % by which workers that train alone for longer must be faster"
    assert words in found.choice("every").reason


def test_a_gain_decides_from_a_bound_on() -> None:
    """Whatever the link, the exact way is left where the lead over it reaches the bound, and only there."""
    seen = set()
    for power in range(40):
        found = ranked(10 ** (6 + power / 10), fixed={"execution": "eager"})
        exact = min(c.step_s for c in found.candidates if c.plan.sync.every == 1)
        fastest = min(c.step_s for c in found.candidates)
        leaves = found.best.plan.sync.every > 1
        assert leaves == (exact > fastest / (1.0 - LEAST_GAIN))
        seen.add(leaves)
    assert seen == {True, False}


def test_a_longer_interval_is_a_larger_change() -> None:
    """And any is larger than a compression: what is as fast and plainer is kept."""
    plans = [c.plan for c in ranked(fixed={"execution": "eager"}).candidates]
    by_interval = {
        every: min(num_changes(p) for p in plans if p.sync.every == every) for every in (1, 8, 50)
    }
    assert by_interval[1] + 1 < by_interval[8] < by_interval[50]


def test_a_short_run_is_left_in_step() -> None:
    """What would have too few exchanges is told, with the run that it takes."""
    steps = LEAST_EXCHANGES * 50
    found = ranked(steps=steps)
    assert intervals(found) == {1, 8, 50}
    (note,) = [note for note in found.notes if note.startswith("left out: ")]
    assert note.endswith("1000 steps have fewer than 20 exchanges, one in 100 steps")
    assert intervals(ranked(steps=steps - 1)) == {1, 8}
    assert intervals(ranked(steps=2 * steps)) == {1, *INTERVALS}


def test_modes_that_a_gpu_replays_exchange_in_every_step() -> None:
    """Others are compared there."""
    workload = make_workload(device="cuda")
    machine = make_machine(device="cuda", bandwidth=1e7)
    plans = [c.plan for c in choose(machine, workload, world_size=2, allow=ALONE).candidates]
    apart = {plan.execution for plan in plans if plan.sync.every > 1}
    assert apart == {"eager", "compiled"}
    assert apart < {plan.execution for plan in plans}


def test_common_parameters_must_fit_in_memory() -> None:
    """A rhythm is ruled out for them where the exact way is not."""
    workload = make_workload(gradient_bytes=[64 * MIB] * 4)
    needs = [c.plan for c in choose(make_machine(), workload, world_size=2).candidates]
    assert needs
    for memory_bytes in range(1 << 30, 4 << 30, 1 << 28):
        machine = make_machine(memory_bytes=memory_bytes)
        fixed = {"accumulate": 1}
        try:
            found = choose(machine, workload, world_size=2, allow=ALONE, fixed=fixed)
        except PlanError:
            continue
        told = [n for n in found.notes if "every" in n and "of memory per worker" in n]
        assert (intervals(found) == {1}) == bool(told)
        if told:
            return
    pytest.fail("at some size only the copies do not fit")


@pytest.mark.parametrize(
    ("names", "adapts"),
    [
        (("aten.mul_.Tensor", "aten.add_.Tensor"), False),
        (("aten.addcmul_.default", "aten.addcdiv_.default"), True),
        (("aten._foreach_addcdiv_.ScalarList",), True),
        (("aten._fused_adamw_.default",), True),
        (("ridgeline.optimizer_step.Adam",), True),
    ],
)
def test_the_optimizer_decides_on_the_outer_one(names: tuple[str, ...], adapts: bool) -> None:
    """DiLoCo's momentum goes with Adam and its kin."""
    workload = with_optimizer(*names)
    assert is_adaptive(workload) == adapts
    outer = [sync.options.get("outer", "average") for sync in known_rhythms(workload)]
    assert outer == ["average", *(["nesterov" if adapts else "average"] * (len(outer) - 1))]


def test_a_worker_alone_has_no_rhythm() -> None:
    """Nor a choice of it."""
    found = ranked(world_size=1)
    assert intervals(found) == {1}
    assert found.choice("every").reason == "no gradients are exchanged"
