"""Cases with a known answer: the virtual clock and the laws must agree to the nanosecond."""

from collections import deque
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import laws
from ridgeline.machine import Setting
from ridgeline.machine.cluster import Level
from ridgeline.plan import Plan
from ridgeline.simulator import schedule
from ridgeline.simulator.curves.scaling import scaling_curve
from ridgeline.simulator.events import READY_ORDER_LANES, SimTask, run_tasks
from ridgeline.simulator.exchange.communication import collective_seconds
from ridgeline.simulator.frames import step_frames
from ridgeline.timeline import LANES, Lane, Span
from strategies import make_machine, make_workload

IN_ORDER: tuple[Lane, ...] = tuple(lane for lane in LANES if lane not in READY_ORDER_LANES)
"""Lanes that stand for as many devices, links or loaders."""

durations = st.integers(1, 10**6)


def end_of(spans: Sequence[Span]) -> int:
    return max(span.end_ns for span in spans)


@given(
    st.lists(st.integers(0, 10**6), min_size=2, max_size=len(IN_ORDER)),
    durations,
    st.integers(0, 10**5),
)
def test_a_ring_message_by_message(arrivals: list[int], piece_ns: int, hop_ns: int) -> None:
    """2 (n-1) messages of S/n over each link, each behind the one that brought what it sends: the ring's law.

    It begins for all when the last has come, and ends for all at once.
    """
    workers = len(arrivals)
    last = 2 * (workers - 1) - 1
    tasks = [
        SimTask(
            name=f"{worker}/{number}",
            lane=IN_ORDER[worker],
            duration_ns=piece_ns + hop_ns,
            reads=(f"{(worker - 1) % workers}/{number - 1}",),
            writes=(f"{worker}/{number}",),
            release_ns=0 if number else arrivals[worker],
        )
        for number in range(last + 1)
        for worker in range(workers)
    ]
    # A byte a nanosecond.
    law = laws.ring_all_reduce_seconds(workers * piece_ns, workers, 1e9, hop_s=hop_ns * 1e-9)
    ends = [span.end_ns for span in run_tasks(tasks) if span.name.endswith(f"/{last}")]
    assert len(ends) == workers
    assert ends == pytest.approx([max(arrivals) + 1e9 * law] * workers)


@given(st.integers(2, 10_000), st.floats(1e3, 1e9), st.floats(1e6, 1e12), st.floats(0.0, 1e-2))
def test_a_collective_is_the_rings(
    workers: int, num_bytes: float, bandwidth: float, latency_s: float
) -> None:
    """From a table of two workers to any number: bytes as on a ring, latency with its messages; one pays nothing."""
    machine = make_machine(latency_s=0.0, bandwidth=bandwidth)
    setting = Setting(device="cpu", workers=workers, threads=1)
    found = collective_seconds(machine, "all_reduce", num_bytes, setting).seconds
    # Of two workers the table says S / B, which on a ring is what each link carries.
    wanted = laws.ring_all_reduce_seconds(num_bytes, workers, bandwidth)
    assert found == pytest.approx(wanted, rel=1e-6)
    alone = Setting(device="cpu", workers=1, threads=1)
    late = make_machine(latency_s=latency_s, bandwidth=bandwidth)
    assert collective_seconds(late, "all_reduce", num_bytes, alone).seconds == 0.0


@given(st.lists(st.tuples(durations, durations), min_size=1, max_size=8), durations, durations)
def test_buckets_hide_as_the_recurrence_says(
    buckets: list[tuple[int, int]], rest_ns: int, update_ns: int
) -> None:
    """start_k = max(ready_k, end_{k-1}); hidden but for the last where each is shorter than what is left to do."""
    lasting = {"optimizer": update_ns, f"backward/{len(buckets)}": rest_ns}
    for number, (computing_ns, reducing_ns) in enumerate(buckets):
        lasting |= {f"backward/{number}": computing_ns, f"all_reduce/{number}": reducing_ns}
    tasks = [
        SimTask(
            name=frame.name,
            lane=frame.lane,
            duration_ns=lasting.get(frame.name, 0),
            reads=frame.reads,
            writes=frame.writes,
        )
        for frame in step_frames(workers=2, num_buckets=len(buckets))
    ]
    spans = {span.name: span for span in run_tasks(tasks)}
    ready = end = 0
    for number, (computing_ns, reducing_ns) in enumerate(buckets):
        ready += computing_ns
        start = max(ready, end)
        end = start + reducing_ns
        span = spans[f"all_reduce/{number}"]
        assert (span.start_ns, span.end_ns) == (start, end)
    computed = ready + rest_ns
    assert spans["optimizer"].end_ns == max(computed, end) + update_ns
    next_ns = [computing_ns for computing_ns, _ in buckets[1:]] + [rest_ns]
    if all(reducing_ns <= left for (_, reducing_ns), left in zip(buckets, next_ns, strict=True)):
        assert spans["optimizer"].start_ns == computed


def one_forward_one_backward(stages: int, batches: int, f_ns: int, b_ns: int) -> list[SimTask]:
    """The tasks of a pipeline: each stage forwards ahead by as many as stages follow it, then in turns."""
    queues = []
    for stage in range(stages):
        ahead = min(batches, stages - 1 - stage)
        order = [("f", number) for number in range(ahead)]
        for number in range(batches - ahead):
            order += [("f", ahead + number), ("b", number)]
        order += [("b", number) for number in range(batches - ahead, batches)]
        queues.append(deque(order))
    tasks: list[SimTask] = []
    done: set[str] = set()
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            kind, number = queue[0]
            # Forward takes what the stage before made, backward what the stage behind did.
            other = stage - 1 if kind == "f" else stage + 1
            needed = f"{kind}/{other}/{number}" if 0 <= other < stages else ""
            if needed and needed not in done:
                continue
            queue.popleft()
            done.add(f"{kind}/{stage}/{number}")
            tasks.append(
                SimTask(
                    name=kind,
                    lane=IN_ORDER[stage],
                    duration_ns=f_ns if kind == "f" else b_ns,
                    reads=(needed,) if needed else (),
                    writes=(f"{kind}/{stage}/{number}",),
                )
            )
    return tasks


@given(st.integers(1, len(IN_ORDER)), st.integers(1, 12), durations, durations)
def test_a_pipeline_of_stages(stages: int, batches: int, f_ns: int, b_ns: int) -> None:
    """(m + p - 1) (f + b), of which each stage idles (p - 1) / (m + p - 1), with any f and b."""
    spans = run_tasks(one_forward_one_backward(stages, batches, f_ns, b_ns))
    end = end_of(spans)
    assert end == laws.pipeline_seconds(stages, batches, f_ns, b_ns)
    for stage in range(stages):
        busy = sum(span.duration_ns for span in spans if span.lane == IN_ORDER[stage])
        assert 1 - busy / end == pytest.approx(laws.pipeline_bubble(stages, batches), abs=1e-12)


@given(st.integers(1, len(IN_ORDER) - 1), durations, durations)
def test_loaders_ahead_of_steps(loaders: int, load_ns: int, step_ns: int) -> None:
    """In the steady state max(load / loaders, step): batches in slots, two for each loader."""
    slots = 2 * loaders
    lanes = [lane for lane in IN_ORDER if lane != "compute"]
    num_steps = 12 * loaders
    tasks: list[SimTask] = []
    for number in range(num_steps):
        slot = f"slot/{number % slots}"
        lane = lanes[number % loaders]
        tasks.append(SimTask(name="load", lane=lane, duration_ns=load_ns, writes=(slot,)))
        tasks.append(SimTask(name="step", lane="compute", duration_ns=step_ns, reads=(slot,)))
    ends = [span.end_ns for span in run_tasks(tasks) if span.name == "step"]
    each = (ends[-1] - ends[-1 - 4 * loaders]) / (4 * loaders)
    wanted = laws.prefetched_step_seconds(load_ns, step_ns, loaders=loaders, depth=slots)
    assert each == pytest.approx(wanted)


@given(durations, durations)
def test_loading_between_steps(load_ns: int, step_ns: int) -> None:
    """One slot, which is filled when the step that read it is over: both, one after the other."""
    tasks: list[SimTask] = []
    for _ in range(5):
        tasks.append(SimTask(name="load", lane="loader", duration_ns=load_ns, writes=("batch",)))
        tasks.append(SimTask(name="step", lane="compute", duration_ns=step_ns, reads=("batch",)))
    wanted = laws.prefetched_step_seconds(load_ns, step_ns, depth=0)
    assert end_of(run_tasks(tasks)) == 5 * wanted


def test_ten_thousand_devices_are_as_many_tasks_as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the clock runs are one worker's frames, with the time of 10,000 in the collectives' and the slowest's."""
    asked: list[int] = []

    def counted(tasks: Sequence[SimTask], *given: object) -> tuple[Span, ...]:
        asked.append(len(tasks))
        return run_tasks(tasks, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(schedule, "run_tasks", counted)
    machine = msgspec.structs.replace(
        make_machine(),
        cluster=(
            Level(size=8, rate_bytes_per_s=1e9, latency_s=1e-6, other_jobs=2),
            Level(size=16, rate_bytes_per_s=4e9, other_bytes_per_s=1e9),
        ),
    )
    scaling_curve(machine, make_workload(), Plan(), (2, 10_000))
    assert asked == [asked[0]] * 2
    assert asked[0] <= 10
