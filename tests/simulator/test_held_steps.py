"""Steps that hold buckets: the period of their pipeline, and what no schedule of them can do."""

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layer_chains import MB, MS, chain, holding
from ridgeline.machine import Machine
from ridgeline.machine.stragglers import Stragglers
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.events import SimTask, run_tasks
from ridgeline.simulator.exchange.late_reads import LATE_UPDATE
from ridgeline.simulator.model import HELD_ON_GPU, StepModel, model_step, setting_of
from ridgeline.simulator.replay import replayed
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.workload import Workload
from strategies import make_machine

ROUNDING_NS = 40
"""Durations are whole nanoseconds, of which a step adds some tens."""


def modelled(machine: Machine, workload: Workload, plan: Plan) -> StepModel:
    return model_step(machine, workload, plan, setting_of(machine, workload, plan))


@st.composite
def chains(draw: st.DrawFn, slowed: bool = False) -> tuple[Machine, Workload, int]:
    """A machine, a chain of layers, and how many of their buckets are held."""
    count = draw(st.integers(2, 6))
    times = st.lists(st.integers(0, 20 * MS), min_size=count, max_size=count)
    sizes = draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count))
    machine = make_machine(
        bandwidth=draw(st.sampled_from([1e7, 1e8, 1e9])),
        latency_s=draw(st.sampled_from([0.0, 1e-3])),
        slowdown=(draw(st.floats(1.0, 2.0)), draw(st.floats(1.0, 2.0))) if slowed else (1.0, 1.0),
    )
    rest = draw(st.integers(0, 20 * MS))
    workload = chain([4000 * size for size in sizes], draw(times), [*draw(times), rest])
    return machine, workload, draw(st.integers(1, count))


def steps_in_a_row(model: StepModel, steps: int) -> list[int]:
    """When the forward pass of each of some steps ends, all of them on one clock, from the very first."""
    tasks: list[SimTask] = []
    ends: list[int] = []

    def add(
        name: str, lane: str, seconds: float, reads: Sequence[str], writes: Sequence[str]
    ) -> None:
        task = SimTask(
            name=name,
            lane=lane,  # type: ignore[arg-type]
            duration_ns=round(seconds * 1e9),
            reads=tuple(reads),
            writes=tuple(writes),
        )
        tasks.append(task)

    def lasting(frame: str, first: int = 0, last: int | None = None) -> float:
        return sum(piece.lane_s for piece in model.pieces.get(frame, ())[first:last])

    held = [read.frame for read in model.late_reads]
    exchanges = [f.name for f in model.frames if f.name.startswith("all_reduce/")]
    early = [name for name in exchanges if name not in held]
    for step in range(steps):
        at = 0
        for read in model.late_reads:
            add("forward", "compute", lasting("forward", at, read.at), (), ())
            late = [f"{read.frame} of {step - 1}"] if step else []
            add("late", "compute", read.update.lane_s if step else 0.0, late, ())
            at = read.at
        ends.append(len(tasks))
        add("forward", "compute", lasting("forward", at), (), ())
        for number, name in enumerate(exchanges):
            add("backward", "compute", lasting(f"backward/{number}"), (), (f"full {number}",))
            if name in early:
                seconds = model.communication_s[name]
                add(name, "communication", seconds, (f"full {number}",), (f"{name} of {step}",))
        add("backward", "compute", lasting(f"backward/{len(exchanges)}"), (), ("over",))
        for name in sorted(held, key=lambda n: -int(n.rpartition("/")[2])):
            seconds = model.communication_s[name]
            add(name, "communication", seconds, ("over",), (f"{name} of {step}",))
        add("wait", "compute", 0.0, [f"{name} of {step}" for name in early], ())
        add("optimizer", "compute", lasting("optimizer"), (), ())
    spans = run_tasks(tasks, model.slowdown)
    return [spans[index].end_ns for index in ends]


@given(chains(slowed=True))
def test_the_period_is_that_of_steps_in_a_row(case: tuple[Machine, Workload, int]) -> None:
    """From the second step on, whether or not computing and communicating hinder each other."""
    machine, workload, held = case
    plan = holding(held)
    first, second, third = steps_in_a_row(modelled(machine, workload, plan), 3)
    told = simulate(machine, workload, plan).step_ns
    assert second - first == pytest.approx(told, abs=ROUNDING_NS)
    assert third - second == pytest.approx(told, abs=ROUNDING_NS)


@given(chains())
def test_nothing_held_is_a_step_that_waits(case: tuple[Machine, Workload, int]) -> None:
    """`held=0` is the default."""
    machine, workload, _ = case
    sync = Sync(bucket_bytes=(1,), options={"held": 0})
    none = Plan(workers=2, threads=1, sync=sync)
    assert simulate(machine, workload, none) == simulate(machine, workload, holding(0))


def idle_ns(timeline: Timeline, held: int) -> int:
    """How long the link would wait for the end of backward, behind the buckets that are not held."""
    spans = {span.name: span for span in timeline.frames}
    names = [name for name in spans if name.startswith("all_reduce/")]
    over = max(span.end_ns for name, span in spans.items() if name.startswith("backward/"))
    early = names[: max(1, len(names) - held)]
    return max(0, over - max(spans[name].end_ns for name in early))


@given(chains())
def test_holding_costs_no_more_than_the_link_waits_for_it(
    case: tuple[Machine, Workload, int],
) -> None:
    """A lane of its own, kept busy until backward is over: never slower than waiting, but for rounding."""
    machine, workload, held = case
    waiting = simulate(machine, workload, holding(0))
    step_ns = simulate(machine, workload, holding(held)).step_ns
    assert step_ns <= waiting.step_ns + idle_ns(waiting, held) + ROUNDING_NS


@given(chains(slowed=True))
def test_no_period_is_shorter_than_its_work(case: tuple[Machine, Workload, int]) -> None:
    """Each lane does all of its work in a period, and an exchange follows what fills its bucket."""
    machine, workload, held = case
    model = modelled(machine, workload, holding(held))
    step_ns = simulate(machine, workload, holding(held)).step_ns
    late_s = sum(read.update.lane_s for read in model.late_reads)
    computing_s = sum(p.lane_s for pieces in model.pieces.values() for p in pieces) + late_s
    communicating_s = sum(model.communication_s.values())
    backward_s = sum(
        p.lane_s for name, ps in model.pieces.items() if name.startswith("backward") for p in ps
    )
    held_s = sum(model.communication_s[read.frame] for read in model.late_reads)
    for least_s in (computing_s, communicating_s, backward_s + held_s):
        assert step_ns >= 1e9 * least_s - ROUNDING_NS


@given(chains(), st.floats(1.0, 100.0))
def test_a_faster_link_takes_no_longer(
    case: tuple[Machine, Workload, int], times_faster: float
) -> None:
    """Monotone in bandwidth."""
    _, workload, held = case
    slow, fast = (
        simulate(make_machine(bandwidth=rate), workload, holding(held)).step_ns
        for rate in (1e8, 1e8 * times_faster)
    )
    assert fast <= slow + ROUNDING_NS


@given(chains(slowed=True))
def test_a_step_is_shown_whole(case: tuple[Machine, Workload, int]) -> None:
    """The frames of a step that waits, one behind the other; late updates are the optimizer's, before backward."""
    machine, workload, held = case
    timeline, waiting = (simulate(machine, workload, holding(n)) for n in (held, 0))
    assert {s.name for s in timeline.frames} == {s.name for s in waiting.frames}
    assert all(0 <= span.start_ns <= span.end_ns <= timeline.step_ns for span in timeline.spans)
    computing = timeline.lane("compute")
    assert all(one.end_ns == next_.start_ns for one, next_ in itertools.pairwise(computing))
    assert (computing[0].start_ns, computing[-1].end_ns) == (0, timeline.step_ns)
    updates = [span for span in timeline.spans if span.name == LATE_UPDATE]
    assert len(updates) == min(held, len(workload.parameters) - 1)
    late_ns = sum(
        s.duration_ns
        for s in computing
        if s.name == "optimizer" and s.start_ns < _first(timeline, "backward/0")
    )
    assert late_ns == sum(span.duration_ns for span in updates)


def _first(timeline: Timeline, name: str) -> int:
    return next(span.start_ns for span in timeline.frames if span.name == name)


def test_the_first_layers_are_waited_for_first() -> None:
    """Three layers over a link that takes 10 ms for each: the second forward pass goes on behind the first."""
    workload = chain([MB] * 3, [5 * MS] * 3, [MS] * 3, update=3 * MS)
    machine = make_machine(bandwidth=1e8, latency_s=0.0)
    plan = holding(2)
    timeline = simulate(machine, workload, plan)
    spans = {s.name: (s.start_ns, s.end_ns) for s in timeline.frames}
    model = modelled(machine, workload, plan)
    assert [(read.frame, read.at) for read in model.late_reads] == [
        ("all_reduce/2", 0),
        ("all_reduce/1", 1),
    ]
    # Backward, from 0: 3 ms and three copies of 2 ms; all_reduce/0 from 3 to 13, /2 to 23, /1 to 33 ms. The
    # step ends with its part of the update at 14. The next waits until 23 for the first layer, then until 33.
    assert spans["wait"][1] - spans["backward/0"][0] == 13 * MS
    assert spans["all_reduce/2"] == (0, 9 * MS)
    assert spans["all_reduce/1"] == (9 * MS, 19 * MS)
    lane = [(s.name, s.start_ns // MS, s.end_ns // MS) for s in timeline.lane("compute")]
    assert lane[:6] == [
        ("wait", 0, 9),
        ("optimizer", 9, 10),
        ("forward", 10, 15),
        ("wait", 15, 19),
        ("optimizer", 19, 20),
        ("forward", 20, 30),
    ]
    waiting = simulate(machine, workload, holding(0)).step_ns
    assert waiting == (15 + 33 + 3) * MS
    assert simulate(machine, workload, plan).step_ns == (30 + 14) * MS


def test_micro_batches_wait_in_the_first() -> None:
    """Which reads the parameters first."""
    workload = chain([MB] * 3, [5 * MS] * 3, [MS] * 3)
    machine = make_machine(bandwidth=1e7, latency_s=0.0)
    held, waiting = (simulate(machine, workload, holding(n, accumulate=2)) for n in (2, 0))
    waits = [(s.start_ns, s.end_ns) for s in held.lane("compute") if s.name == "wait"]
    assert waits[0][0] == 0
    assert waits[1][1] <= _first(held, "forward")
    for name in ("micro/0", "forward", "optimizer"):
        assert held.total_ns(name) == pytest.approx(waiting.total_ns(name), abs=ROUNDING_NS)
    assert held.step_ns < waiting.step_ns


def test_a_slower_worker_updates_late_as_slowly() -> None:
    """The step of the slowest includes its late updates."""
    workload = chain([MB] * 3, [5 * MS] * 3, [MS] * 3)
    plain = make_machine(bandwidth=1e12, latency_s=0.0)
    slow = msgspec.structs.replace(plain, stragglers=Stragglers(slow=1, slowdown=2.0))
    first, second = (simulate(m, workload, holding(2)).step_ns for m in (plain, slow))
    assert second == pytest.approx(2 * first, rel=1e-3)


def test_what_goes_on_in_the_next_step_is_not_replayed() -> None:
    """Its frames do not tell what the clock would need; those of a step that waits do."""
    workload = chain([MB] * 3, [5 * MS] * 3, [MS] * 3)
    machine = make_machine(bandwidth=1e7, latency_s=0.0)
    held, waiting = (simulate(machine, workload, holding(n), details=False) for n in (2, 0))
    assert replayed(held) is None
    told = replayed(waiting)
    assert told is not None
    assert told.error == 0.0


def test_on_a_gpu_it_says_that_it_was_never_run() -> None:
    """The step is that of one that waits, and a note says so."""
    workload = chain([MB] * 3, [5 * MS] * 3, [MS] * 3, device="cuda")
    machine = make_machine(device="cuda", bandwidth=1e8)
    held, waiting = (simulate(machine, workload, holding(n)) for n in (2, 0))
    assert held.step_ns == waiting.step_ns
    assert HELD_ON_GPU in held.notes
