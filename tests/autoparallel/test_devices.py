"""Placed programs: copies, the order of issue, and the same results as the function, without GPUs.

Two devices that are both the CPU run everything that decides; a missing copy shows as a missing value.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.autoparallel.graphs.dag import Dag, descendants
from ridgeline.autoparallel.graphs.program import Program, trace_program
from ridgeline.autoparallel.lanes.devices import DeviceProgram, traffic_of, with_index
from ridgeline.autoparallel.lanes.issue import pieces
from ridgeline.autoparallel.scheduling.placement import Placement
from ridgeline.autoparallel.scheduling.transfers import Copy, Traffic, plan_transfers
from ridgeline.errors import ScheduleError

HOME = torch.device("cpu")


class Notes:
    """Lanes that only take notes, and check that nothing waits for what has not been signalled."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.signalled: set[int] = set()
        self.is_forked = False

    def fork(self) -> None:
        assert not self.is_forked
        self.is_forked = True
        self.signalled.clear()

    def enter(self, lane: int) -> None:
        self.entered.append(lane)

    def wait(self, node: int) -> None:
        assert node in self.signalled

    def signal(self, node: int) -> None:
        self.signalled.add(node)

    def join(self) -> None:
        assert self.is_forked
        self.is_forked = False


def place_by_hand(program: Program, device_of: Sequence[int]) -> Placement:
    starts = tuple(float(index) for index in range(len(device_of)))
    return Placement(tuple(device_of), starts, tuple(start + 1.0 for start in starts), ())


def two_towers() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    left, right = nn.Linear(6, 6), nn.Linear(6, 6)
    parameters = [*left.parameters(), *right.parameters()]

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = (left(x).tanh() * right(y).tanh()).sum() + x.mean()
        return (loss, *torch.autograd.grad(loss, parameters))

    return fn, (torch.randn(4, 6), torch.randn(4, 6))


@st.composite
def placed_dags(draw: st.DrawFn) -> tuple[Dag, tuple[int, ...], Traffic]:
    """A random program: every operation makes a slot and reads some earlier ones; some slots come from outside."""
    count = draw(st.integers(1, 12))
    num_inputs = draw(st.integers(0, 3))
    devices = draw(st.integers(1, 3))
    device_of = tuple(draw(st.integers(0, devices - 1)) for _ in range(count))
    reads: list[tuple[int, ...]] = []
    edges: set[tuple[int, int]] = set()
    for index in range(count):
        slots = (
            draw(st.sets(st.integers(0, num_inputs + index - 1), max_size=3))
            if num_inputs + index
            else set()
        )
        reads.append(tuple(sorted(slots)))
        edges.update((slot - num_inputs, index) for slot in slots if slot >= num_inputs)
    homes = {slot: draw(st.integers(0, devices - 1)) for slot in range(num_inputs)}
    makes = [(num_inputs + index,) for index in range(count)]
    return Dag.of(count, edges), device_of, Traffic(reads, makes, homes)


@settings(max_examples=200)
@given(placed_dags())
def test_every_value_is_where_it_is_read(case: tuple[Dag, tuple[int, ...], Traffic]) -> None:
    """Issued in order, each operation finds its values on its device, and each value is copied there once."""
    dag, device_of, traffic = case
    itinerary = plan_transfers(dag, device_of, traffic)
    there = {(slot, device) for slot, device in traffic.homes.items()}
    for step in itinerary.steps:
        if isinstance(step, Copy):
            assert (step.slot, step.source) in there
            assert (step.slot, step.target) not in there
            there.add((step.slot, step.target))
        else:
            assert {(slot, device_of[step]) for slot in traffic.reads[step]} <= there
            there.update((slot, device_of[step]) for slot in traffic.makes[step])
    assert sorted(step for step in itinerary.steps if isinstance(step, int)) == list(
        range(dag.num_nodes)
    )


@settings(max_examples=200)
@given(placed_dags())
def test_the_order_of_lanes_and_the_syncs_imply_every_need(
    case: tuple[Dag, tuple[int, ...], Traffic],
) -> None:
    """By the order on each lane and the waits alone, a reader comes after the copy and a copy after the maker."""
    dag, device_of, traffic = case
    itinerary = plan_transfers(dag, device_of, traffic)
    schedule = itinerary.schedule
    implied = list(schedule.syncs)
    for nodes in schedule.nodes_by_lane():
        implied += itertools.pairwise(nodes)
    after = descendants(Dag.of(len(itinerary.steps), implied))

    def come_in_order(first: int, second: int) -> bool:
        return bool(after[first] >> second & 1)

    for u, v in dag.edges:
        assert come_in_order(itinerary.steps.index(u), itinerary.steps.index(v))
    maker = {slots[0]: operation for operation, slots in enumerate(traffic.makes)}
    for place, step in enumerate(itinerary.steps):
        if not isinstance(step, Copy):
            continue
        if step.slot in maker:
            assert come_in_order(itinerary.steps.index(maker[step.slot]), place)
        for reader, slots in enumerate(traffic.reads):
            if step.slot in slots and device_of[reader] == step.target:
                assert come_in_order(place, itinerary.steps.index(reader))


@settings(max_examples=200)
@given(placed_dags())
def test_pieces_wait_first_signal_last_and_can_be_issued_in_their_order(
    case: tuple[Dag, tuple[int, ...], Traffic],
) -> None:
    """Pieces hold every node once, in lane order; what a piece waits for was signalled by an earlier one."""
    schedule = plan_transfers(*case).schedule
    found = pieces(schedule)
    signalled: set[int] = set()
    by_lane: dict[int, list[int]] = {}
    for piece in found:
        assert set(piece.waits) <= signalled
        by_lane.setdefault(piece.lane, []).extend(piece.nodes)
        if piece.signals:
            signalled.add(piece.nodes[-1])
    assert [tuple(by_lane.get(lane, ())) for lane in range(schedule.num_lanes)] == list(
        schedule.nodes_by_lane()
    )
    assert signalled == schedule.signals()


@settings(max_examples=50)
@given(st.data())
def test_any_placement_gives_the_results_of_the_function(data: st.DataObject) -> None:
    """Wherever operations are placed, loss and gradients are exactly those of the function."""
    fn, args = two_towers()
    program = trace_program(fn, args)
    count = len(program.operations)
    device_of = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    for index in program.in_place:
        device_of[index] = 0
    placed = DeviceProgram(program, place_by_hand(program, device_of), [HOME, HOME], lanes=Notes())
    for got, want in zip(placed(*args), fn(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_updates_of_state_are_seen_on_every_device() -> None:
    """State that another device needs is copied at every call, so its new values count at once."""
    weight = torch.ones(3)
    program = trace_program(lambda x: (x * weight, x + 1), (torch.ones(3),))
    placed = DeviceProgram(program, place_by_hand(program, (1, 1)), [HOME, HOME], lanes=Notes())
    x = torch.ones(3)
    torch.testing.assert_close(placed(x)[0], torch.ones(3), rtol=0, atol=0)
    weight.data.mul_(5.0)
    torch.testing.assert_close(placed(x)[0], torch.full((3,), 5.0), rtol=0, atol=0)


def test_work_of_the_host_is_issued_last() -> None:
    """What merely has to be enqueued goes first, and the host works on its own once nothing is left of it."""
    dag = Dag.of(4, [(0, 3)])
    traffic = Traffic([(), (), (), (0,)], [(0,), (1,), (2,), (3,)], {})
    itinerary = plan_transfers(dag, (2, 0, 1, 0), traffic, hosts=(2,))
    assert itinerary.steps == (1, 2, 0, Copy(0, 2, 0), 3)
    assert itinerary.schedule.lanes == ("compute:0", "compute:1", "compute:2", "copy:2-0")


def test_a_move_of_the_function_itself_runs_beside_the_computing() -> None:
    """An operation that moves a value between devices is on the lane of that pair and takes it as it is."""
    dag = Dag.of(2, [(0, 1)])
    traffic = Traffic([(0,), (1,)], [(1,), (2,)], {0: 1}, as_they_are={(0, 0)}, crossings={0: 1})
    itinerary = plan_transfers(dag, (0, 0), traffic)
    assert itinerary.steps == (0, 1)
    assert itinerary.handed == {0: ((0, 1),)}
    assert [itinerary.routes[lane] for lane in itinerary.schedule.lane_of] == [(1, 0), (0, 0)]


def test_inputs_may_be_where_nothing_runs() -> None:
    """A device that only holds inputs need not be given; they are copied from it."""
    program = trace_program(lambda x: x * 2, (torch.ones(3),))
    placed = DeviceProgram(program, place_by_hand(program, (0,)), ["meta"], lanes=Notes())
    assert [(copy.source, copy.target) for copy in placed.copies] == [(1, 0)]
    assert placed(torch.ones(3)).device == torch.device("meta")


def test_a_failure_joins_the_lanes() -> None:
    """An operation that fails leaves no lane open: the next call works."""
    program = trace_program(lambda x: (x.log(), x.exp()), (torch.ones(3),))
    notes = Notes()
    placed = DeviceProgram(program, place_by_hand(program, (0, 1)), [HOME, HOME], lanes=notes)
    with pytest.raises(RuntimeError):
        placed(torch.ones(3, 2).to_sparse())
    assert not notes.is_forked
    placed(torch.ones(3))


def test_messages() -> None:
    """Misuse is named with what to do."""
    program = trace_program(lambda x: x * 2, (torch.ones(3),))
    with pytest.raises(
        ScheduleError, match=r"a device for each of 1 operations, got 2; place program.dag"
    ):
        DeviceProgram(program, place_by_hand(program, (0, 0)), [HOME], lanes=Notes())
    with pytest.raises(
        ScheduleError, match=r"on the devices meta, got .* on cpu; add cpu to devices"
    ):
        traffic_of(program, (0,), [torch.device("meta")])
    with pytest.raises(ScheduleError, match="the 3 devices of the placement, got 1 devices; give"):
        DeviceProgram(program, place_by_hand(program, (2,)), [HOME], lanes=Notes())
    buffer = torch.zeros(3)
    written = trace_program(lambda x: buffer.add_(x) * 2, (torch.ones(3),))
    meta = torch.device("meta")
    with pytest.raises(
        ScheduleError, match="memory that is written in place, on cpu, got meta; pin"
    ):
        DeviceProgram(
            written,
            place_by_hand(written, (1,) * len(written.operations)),
            [HOME, meta],
            lanes=Notes(),
        )


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere in torch: on the second worker of a host `cuda` is the second GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert with_index(torch.device("cuda")) == torch.device("cuda", 1)
    assert with_index(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert with_index(HOME) == HOME
