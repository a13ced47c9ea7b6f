"""What comes from a device to the CPU: nobody reads it before the host has waited for it, and nothing else waits.

Lanes that remember what came before stand in for streams; on them a value lands only when the host
waits for it, and is nothing but NaN until then.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.autoparallel.graphs import moves
from ridgeline.autoparallel.graphs.dag import Dag
from ridgeline.autoparallel.graphs.moves import is_move
from ridgeline.autoparallel.graphs.program import Program, trace_program
from ridgeline.autoparallel.lanes.devices import DeviceProgram, traffic_of
from ridgeline.autoparallel.lanes.issue import pieces
from ridgeline.autoparallel.scheduling.placement import Placement
from ridgeline.autoparallel.scheduling.traffic import Arrival, Copy, Step, Traffic
from ridgeline.autoparallel.scheduling.transfers import Itinerary, plan_transfers

HOST = 0
DEVICES = [torch.device("cpu"), torch.device("meta")]


class Landing:
    """Lanes on which the host has only what it computed itself or waited for."""

    def __init__(self, host_lanes: Sequence[bool] = ()) -> None:
        self.host_lanes = host_lanes
        self.host: set[Any] = set()
        self.entered = 0

    def fork(self) -> None:
        self.host = set()
        self.done: list[set[Any]] = [set() for _ in self.host_lanes]
        self.events: dict[int, set[Any]] = {}

    def enter(self, lane: int) -> None:
        self.entered = lane

    def run(self, what: Any) -> set[Any]:
        """What comes before something that is issued to the entered lane."""
        done = self.host if self.host_lanes[self.entered] else self.done[self.entered]
        before = done | self.host
        done.add(what)
        return before

    def wait(self, node: int) -> None:
        if self.host_lanes[self.entered]:
            self.arrive(self.events[node])
        else:
            self.done[self.entered] |= self.events[node]

    def signal(self, node: int) -> None:
        is_host = self.host_lanes[self.entered]
        self.events[node] = set() if is_host else self.done[self.entered] | self.host

    def arrive(self, done: set[Any]) -> None:
        self.host |= done

    def join(self) -> None:
        """Streams wait for streams; the host goes on."""


@st.composite
def placed_dags(draw: st.DrawFn) -> tuple[Dag, tuple[int, ...], Traffic]:
    """Random programs over the CPU, device 0, and others; some operations move their value themselves."""
    count, num_inputs = draw(st.integers(1, 12)), draw(st.integers(0, 3))
    device_of = tuple(draw(st.integers(0, 2)) for _ in range(count))
    homes = {slot: draw(st.integers(0, 2)) for slot in range(num_inputs)}
    owner = homes | {num_inputs + index: device for index, device in enumerate(device_of)}
    reads: list[tuple[int, ...]] = []
    edges: set[tuple[int, int]] = set()
    as_they_are: set[tuple[int, int]] = set()
    crossings: dict[int, int] = {}
    moved: set[int] = set()
    for index in range(count):
        known = st.integers(0, num_inputs + index - 1)
        slots = draw(st.sets(known, max_size=3)) if num_inputs + index else set()
        reads.append(tuple(sorted(slots)))
        edges.update((slot - num_inputs, index) for slot in slots if slot >= num_inputs)
        if index:  # edges that only order
            orders = draw(st.sets(st.integers(0, index - 1), max_size=2))
            edges.update((earlier, index) for earlier in orders)
        foreign = sorted(slot for slot in slots if owner[slot] != device_of[index])
        if len(slots) == len(foreign) == 1 and draw(st.booleans()):
            as_they_are.add((index, foreign[0]))
            crossings[index] = owner[foreign[0]]
            if device_of[index] == HOST and draw(st.booleans()):
                moved.add(index)
        elif len(slots) > 1:  # numbers, which the host holds
            numbers = [slot for slot in foreign if owner[slot] == HOST and draw(st.booleans())]
            as_they_are.update((index, slot) for slot in numbers)
    makes = [(num_inputs + index,) for index in range(count)]
    results = frozenset(slots[0] for slots in makes if draw(st.booleans()))
    traffic = Traffic(reads, makes, homes, as_they_are, crossings, moved, results)
    return Dag.of(count, edges), device_of, traffic


def run_through(
    itinerary: Itinerary,
) -> tuple[dict[Step, set[Any]], dict[Step, set[Any]], set[Any]]:
    """For each step what comes before it and what the host has by then; and what it has in the end."""
    lanes = Landing([route == (HOST, HOST) for route in itinerary.routes])
    before: dict[Step, set[Any]] = {}
    there: dict[Step, set[Any]] = {}
    lanes.fork()
    for piece in pieces(itinerary.schedule):
        lanes.enter(piece.lane)
        for node in piece.waits:
            lanes.wait(node)
        for node in piece.nodes:
            step = itinerary.steps[node]
            there[step] = set(lanes.host)
            before[step] = lanes.run(step)
        if piece.signals:
            lanes.signal(piece.nodes[-1])
    lanes.join()
    return before, there, lanes.host


@settings(max_examples=300)
@given(placed_dags())
def test_nobody_reads_what_has_not_come(case: tuple[Dag, tuple[int, ...], Traffic]) -> None:
    """Every reader comes after what it reads; if that is in host memory, the host has waited for it."""
    dag, device_of, traffic = case
    itinerary = plan_transfers(dag, device_of, traffic, hosts=(HOST,))
    before, there, _ = run_through(itinerary)
    maker = {slots[0]: operation for operation, slots in enumerate(traffic.makes)}
    owner = {slot: device_of[operation] for slot, operation in maker.items()} | dict(traffic.homes)

    def check(reader: Step, source: Step | None, device: int) -> None:
        if source is not None:
            assert source in (there if device == HOST else before)[reader]

    for step in itinerary.steps:
        if isinstance(step, Copy):
            check(step, maker.get(step.slot), step.source)
        elif isinstance(step, int):
            for slot in traffic.reads[step]:
                is_here = owner[slot] == device_of[step] or (step, slot) in traffic.as_they_are
                copy = Copy(slot, owner[slot], device_of[step])
                if is_here:
                    check(step, maker.get(slot), owner[slot])
                else:
                    check(step, copy, device_of[step])


@settings(max_examples=300)
@given(placed_dags())
def test_results_have_come_when_the_call_returns(
    case: tuple[Dag, tuple[int, ...], Traffic],
) -> None:
    """The host has in the end every result that is in its memory, and waits for nothing that nobody reads."""
    dag, device_of, traffic = case
    itinerary = plan_transfers(dag, device_of, traffic, hosts=(HOST,))
    *_, there = run_through(itinerary)
    for operation, (slot,) in enumerate(traffic.makes):
        if slot in traffic.results and device_of[operation] == HOST:
            assert operation in there
        arrivals = itinerary.steps.count(Arrival(operation))
        is_read = any(slot in slots for slots in traffic.reads)
        assert arrivals <= (slot in traffic.results or is_read)


@settings(max_examples=300)
@given(placed_dags())
def test_the_host_enqueues_before_it_waits(case: tuple[Dag, tuple[int, ...], Traffic]) -> None:
    """At an arrival or an operation of the CPU no move is left whose value has been issued."""
    dag, device_of, traffic = case
    steps = plan_transfers(dag, device_of, traffic, hosts=(HOST,)).steps
    place = {step: index for index, step in enumerate(steps)}
    parents = dag.parents()
    for operation in traffic.moves:
        ready = max((place[parent] for parent in parents[operation]), default=-1)
        for step in steps[ready + 1 : place[operation]]:
            assert isinstance(step, Copy) or step in traffic.moves


def test_the_cpu_works_while_a_value_comes() -> None:
    """A move is issued before the work of the CPU that does not need it, and its arrival after that."""
    # x.dot, y.dot on the device, its move, their sum
    dag = Dag.of(4, [(1, 2), (0, 3), (2, 3)])
    reads, makes = [(0,), (1,), (3,), (2, 4)], [(2,), (3,), (4,), (5,)]
    traffic = Traffic(reads, makes, {0: 0, 1: 1}, {(2, 3)}, {2: 1}, {2}, frozenset({5}))
    itinerary = plan_transfers(dag, (0, 1, 0, 0), traffic, hosts=(HOST,))
    assert itinerary.steps == (1, 2, 0, Arrival(2), 3)
    assert itinerary.schedule.syncs == ((0, 1), (1, 3))
    assert itinerary.schedule.lanes == ("compute:0", "compute:1", "copy:1-0")
    blocking = plan_transfers(dag, (0, 1, 0, 0), traffic._replace(moves=()), hosts=(HOST,))
    assert blocking.steps == (1, 0, 2, Arrival(2), 3)


def test_what_a_device_reads_on_the_host_is_waited_for_last() -> None:
    """A moved value that goes on to a device holds up neither its move nor what else is enqueued."""
    # a move from device 1, work that reads it on device 2, other work there, and a later one on device 1
    dag = Dag.of(4, [(0, 1)])
    traffic = Traffic([(0,), (1,), (), ()], [(1,), (2,), (3,), (4,)], {0: 1}, {(0, 0)}, {0: 1}, {0})
    itinerary = plan_transfers(dag, (0, 2, 2, 1), traffic, hosts=(HOST,))
    assert itinerary.steps == (0, 2, 3, Arrival(0), Copy(1, 0, 2), 1)


def test_a_reader_is_not_issued_with_what_a_stream_holds_back() -> None:
    """A device may come after a move without the host; who reads the number it brings may not."""
    # a move from device 1; on device 2 work that only comes after it, and work that reads the number
    dag = Dag.of(3, [(0, 1), (0, 2)])
    reads, makes = [(0,), (1,), (1, 2)], [(2,), (3,), (4,)]
    traffic = Traffic(reads, makes, {0: 1, 1: 2}, {(0, 0), (2, 2)}, {0: 1}, {0})
    itinerary = plan_transfers(dag, (0, 2, 2), traffic, hosts=(HOST,))
    assert itinerary.steps == (0, 1, Arrival(0), 2)
    _, there, _ = run_through(itinerary)
    assert 0 not in there[1]
    assert 0 in there[2]


def moving(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Moves that are read, returned, and both; of results, of inputs, and of views, seen through views."""
    remote = (y @ y).tanh().to("cpu")
    row = (y * 2)[1:, :2].t().cpu()
    scale = y.sum().cpu()
    total = remote.t()[:2, :2] + x @ x
    return total, remote, remote[0], (y + 1).cpu(), y.t()[1:].cpu(), row.sum(0), y * scale


def placed_by_hand(program: Program, lanes: Landing) -> DeviceProgram:
    device_of = tuple(DEVICES.index(operation.device) for operation in program.operations)
    starts = tuple(map(float, range(len(device_of))))
    placement = Placement(device_of, starts, starts, ())
    placed = DeviceProgram(program, placement, DEVICES, lanes=lanes)
    lanes.host_lanes = [name == "compute:0" for name in placed.schedule.lanes]
    return placed


def test_moved_values_are_whole_in_every_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several calls with changed inputs each result is exactly the function's when the call returns."""

    class Slow(Landing):
        """What is copied is NaN until it arrives; entries of lanes are what remains to be filled."""

        def arrive(self, done: set[Any]) -> None:
            super().arrive(done)
            for index in done:
                there, value = copies[index]
                there.copy_(value)

    copies: list[tuple[Tensor, Tensor]] = []
    lanes = Slow()

    def begin(value: Tensor, memory_format: torch.memory_format) -> Tensor:
        there = torch.full_like(value, torch.nan, memory_format=memory_format)
        lanes.run(len(copies))
        copies.append((there, value))
        return there

    monkeypatch.setattr(moves, "begin_copy", begin)
    program = trace_program(moving, (torch.ones(2, 2), torch.ones(4, 4, device="meta")))
    placed = placed_by_hand(program, lanes)
    for call in range(3):
        # Tensors of the CPU stand in for those of the device: only the trace knows the difference.
        x, y = torch.randn(2, 2), torch.randn(4, 4)
        for got, want in zip(placed(x, y), moving(x, y), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert len(copies) == 5 * (call + 1)


def test_only_plain_copies_to_the_cpu_are_moves() -> None:
    """A change of the dtype, or a copy within the CPU or to a device, runs as it is written."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return y.cpu(), y.to("cpu", torch.float64), x.to("meta"), x.to(torch.float64), y + 1

    program = trace_program(fn, (torch.ones(3), torch.ones(3, device="meta")))
    assert [is_move(operation.node) for operation in program.operations] == [
        True,
        False,
        False,
        False,
        False,
    ]
    device_of = [DEVICES.index(operation.device) for operation in program.operations]
    assert traffic_of(program, device_of, DEVICES).moves == {0}
    assert traffic_of(program, [1] * 5, DEVICES).moves == set()
