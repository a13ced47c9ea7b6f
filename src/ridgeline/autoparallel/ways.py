"""The ways to run a program on what it was given: threads, streams, or several devices."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ridgeline.autoparallel.costs import measure_costs
from ridgeline.autoparallel.graphs.aliasing import num_bytes
from ridgeline.autoparallel.graphs.gradients import Differentiable, Halves
from ridgeline.autoparallel.graphs.moves import is_move
from ridgeline.autoparallel.graphs.program import Program
from ridgeline.autoparallel.lanes.devices import DeviceProgram
from ridgeline.autoparallel.lanes.graph_clock import stream_sync_s
from ridgeline.autoparallel.lanes.streams import StreamProgram
from ridgeline.autoparallel.lanes.threads import ThreadProgram, measure_sync_s
from ridgeline.autoparallel.scheduling.links import LinkSeconds, link_seconds
from ridgeline.autoparallel.scheduling.list_schedule import list_schedule
from ridgeline.autoparallel.scheduling.makespan import Bounds, NodeCost, find_bounds, run_schedule
from ridgeline.autoparallel.scheduling.placement import place
from ridgeline.autoparallel.scheduling.schedule import Schedule, serial_schedule
from ridgeline.autoparallel.selection import MOST_STREAMS, SERIAL, candidates
from ridgeline.callables.calls.graph import CallGraph
from ridgeline.errors import CaptureError, PlanError
from ridgeline.machine import Machine
from ridgeline.state.saved_state import preserved

MOST_THREADS = 4
"""Lanes on the CPU by default: Python's global lock lets few threads issue small operators at once."""


class ProgramWay(NamedTuple):
    """One way to run a program.

    `predicted_s` are seconds of a call on the virtual clock; `make` makes the callable, with the function's
    arguments.
    """

    name: str
    schedule: Schedule
    predicted_s: float
    make: Callable[[], Callable[..., Any]]


class Offer(NamedTuple):
    """What can be done with a program: the ways, the one on one lane first, and what none can beat."""

    ways: tuple[ProgramWay, ...]
    bounds: Bounds
    device: str
    operations: int
    edges: int


def offer(
    program: Program,
    args: tuple[Any, ...],
    *,
    devices: Sequence[torch.device],
    lanes: int | None,
    machine: Machine | None,
    capture: bool,
) -> Offer:
    """The ways for a program on these devices.

    Raises:
        PlanError: a device is neither a CPU nor a CUDA device, or lanes are below 1.
        MachineError: the machine has no figures for a link between the devices.

    Cost: Measures every distinct operation: milliseconds each.
    """
    if lanes is not None and (type(lanes) is not int or lanes < 1):
        cure = "raise it" if type(lanes) is int else "give a whole number"
        raise PlanError(f"wanted at least 1 lane, got lanes={lanes!r} for parallelize; {cure}")
    # More lanes than there is work for would only cost memory.
    lanes = lanes and max(1, min(lanes, len(program.operations)))
    kinds = sorted({device.type for device in devices})
    if not set(kinds) <= {"cpu", "cuda"}:
        raise PlanError(
            f"wanted tensors on the CPU or on CUDA devices, got {', '.join(kinds)} for parallelize; move "
            "them with .to(device) first"
        )
    if len(devices) > 1:
        # One operation at a time runs on the CPU, so it has all threads.
        costs = measure_costs(program, args, threads=torch.get_num_threads())
        return _on_devices(program, costs, list(devices), machine)
    costs = measure_costs(program, args)
    if kinds == ["cuda"]:
        return _on_streams(program, costs, args, lanes or MOST_STREAMS, capture, devices[0])
    return _on_threads(program, costs, lanes or min(len(os.sched_getaffinity(0)), MOST_THREADS))


def offer_halves(
    halves: Halves, args: tuple[Any, ...], offer_for: Callable[[Program, tuple[Any, ...]], Offer]
) -> Offer:
    """The ways for forward and backward together: of the same name where both have it, else serially.

    Raises:
        CaptureError: the forward program does not keep what the backward program needs.

    Cost: One call of the forward program, besides what `offer` costs for each.
    """
    # Of whatever nest the arguments are, the two programs take their tensors, as operators of autograd do.
    given = tuple(pytree.tree_leaves(args))
    forward = offer_for(halves.forward, given)
    with preserved(list(halves.forward.state.values())):
        plain = [tensor.detach() for tensor in given]
        results, saved = halves.forward.run(*plain)
    if any(value is None for value in saved):
        raise CaptureError(
            "wanted operators that keep what backward needs, got one that keeps it under autograd only (an "
            "LSTM of oneDNN is one); call parallelize under torch.no_grad(), or inside of "
            "torch.backends.mkldnn.flags(enabled=False)"
        )
    # Costs of backward depend on shapes, hardly on values: any gradient of the right shape will do.
    ones = [torch.ones_like(results[index]) for index in halves.roots]
    backward = offer_for(halves.backward, (*saved, *ones))
    first = {way.name: way for way in forward.ways}
    second = {way.name: way for way in backward.ways}

    def way(name: str) -> ProgramWay:
        # A half without independent parts has the serial way only, and may go with any of the other's.
        one, two = first.get(name, first[SERIAL]), second.get(name, second[SERIAL])
        return ProgramWay(
            name,
            one.schedule if one.name == name else two.schedule,
            one.predicted_s + two.predicted_s,
            lambda: Differentiable(halves, one.make(), two.make()),
        )

    bounds = Bounds(
        critical_path_s=forward.bounds.critical_path_s + backward.bounds.critical_path_s,
        work_s=forward.bounds.work_s + backward.bounds.work_s,
        link_s=forward.bounds.link_s + backward.bounds.link_s,
    )
    return Offer(
        tuple(way(name) for name in dict.fromkeys((*first, *second))),
        bounds,
        forward.device,
        forward.operations + backward.operations,
        forward.edges + backward.edges,
    )


def _on_threads(program: Program, costs: Sequence[NodeCost], lanes: int) -> Offer:
    # Lanes do not share what they compute with, as streams of one device do.
    costs = [cost._replace(fill=1.0 / lanes) for cost in costs]
    sync_s = measure_sync_s() if lanes > 1 else 0.0
    found = candidates(program.dag, costs, lanes, sync_s=sync_s)
    seconds = [cost.seconds for cost in costs]
    for count in dict.fromkeys((2, lanes)) if lanes > 1 else ():
        listed = list_schedule(program.dag, seconds, count, sync_s=sync_s)
        if listed.num_lanes > 1 and listed not in found.values():
            found[f"list, {listed.num_lanes} lanes"] = listed
    threads = torch.get_num_threads()

    def way(name: str, schedule: Schedule) -> ProgramWay:
        predicted = run_schedule(costs, schedule, sync_s=sync_s).makespan
        if schedule.num_lanes <= 1:  # none where the program has no operations
            return ProgramWay(name, schedule, predicted, lambda: program.run)
        # Lanes share the process's threads; with all for each, operators would wait for each other's cores.
        own = max(1, threads // schedule.num_lanes)
        return ProgramWay(
            name, schedule, predicted, lambda: ThreadProgram(program, schedule, threads=own)
        )

    ways = tuple(way(name, schedule) for name, schedule in found.items())
    return Offer(ways, find_bounds(program.dag, costs), "cpu", *_size(program))


def _on_streams(
    program: Program,
    costs: Sequence[NodeCost],
    args: tuple[Any, ...],
    lanes: int,
    capture: bool,
    device: torch.device,
) -> Offer:
    sync_s = stream_sync_s(device)

    def way(name: str, schedule: Schedule) -> ProgramWay:
        predicted = run_schedule(costs, schedule, sync_s=sync_s).makespan
        if capture:
            return ProgramWay(
                name, schedule, predicted, lambda: CapturedProgram(program, schedule, args)
            )
        return ProgramWay(name, schedule, predicted, lambda: StreamProgram(program, schedule))

    found = candidates(program.dag, costs, lanes, sync_s=sync_s)
    ways = tuple(way(name, schedule) for name, schedule in found.items())
    return Offer(ways, find_bounds(program.dag, costs), str(device), *_size(program))


def _on_devices(
    program: Program,
    costs: Sequence[NodeCost],
    devices: list[torch.device],
    machine: Machine | None,
) -> Offer:
    """As it is placed, one operation after the other and side by side; and as HEFT places it."""
    homes = [devices.index(operation.device) for operation in program.operations]
    links = link_seconds(devices, machine)
    apart = _without_moves(program, costs, links, devices)
    table = [[cost.seconds for cost in apart] for _ in devices]
    fixed = dict(enumerate(homes))
    gpus = [index for index, device in enumerate(devices) if device.type == "cuda"]
    as_placed = place(program.dag, table, program.edge_bytes, links, fixed)
    chosen = place(
        program.dag, table, program.edge_bytes, links, _pinned(program, devices), spread=gpus
    )
    placements = {"as placed": as_placed}
    if chosen.device_of != as_placed.device_of:
        placements["HEFT"] = chosen
    serial = serial_schedule(program.dag)
    one_by_one_s = sum(cost.seconds for cost in costs)
    # With moves at their full cost: as written the host waits for each of them.
    ways = [ProgramWay(SERIAL, serial, one_by_one_s, lambda: program.run)]
    for name, placement in placements.items():
        made = DeviceProgram(program, placement, devices)
        ways.append(ProgramWay(name, made.schedule, placement.makespan, lambda made=made: made))
    best = min(placements.values(), key=lambda placement: placement.makespan)
    bounds = find_bounds(program.dag, apart, num_devices=len(devices), transfers=best.transfers)
    return Offer(tuple(ways), bounds, ", ".join(map(str, devices)), *_size(program))


def _size(program: Program) -> tuple[int, int]:
    return len(program.operations), len(program.dag.edges)


def _pinned(program: Program, devices: Sequence[torch.device]) -> dict[int, int]:
    """Where operations must be: updates in place, what makes results, what is on the CPU or copies there."""
    made = {slot: index for index, op in enumerate(program.operations) for slot in op.makes}
    pinned = {made[slot] for slot in program.outputs if slot in made} | set(program.in_place)
    sources = [*program.state.values(), *program.inputs]
    device_of = {slot: value.device for slot, value in zip(program.sources, sources, strict=True)}
    for index, operation in enumerate(program.operations):
        places = {operation.device}
        places |= {device_of[slot] for slot in operation.reads if slot in device_of}
        places |= {
            program.operations[made[slot]].device for slot in operation.reads if slot in made
        }
        # What reads from two devices moves a value itself, to where the trace says.
        if len(places) > 1 or operation.device.type == "cpu":
            pinned.add(index)
    return {index: devices.index(program.operations[index].device) for index in sorted(pinned)}


def _without_moves(
    program: Program, costs: Sequence[NodeCost], links: LinkSeconds, devices: Sequence[torch.device]
) -> list[NodeCost]:
    """The costs, where moves of inputs to the CPU occupy their link; others are transfers of their edges."""
    fed = {reader for (_, reader), size in program.edge_bytes.items() if size}
    found: list[NodeCost] = []
    for index, (operation, cost) in enumerate(zip(program.operations, costs, strict=True)):
        found.append(cost)
        if not is_move(operation.node):
            continue
        (argument,) = operation.node.all_input_nodes
        source, target = argument.meta["val"].device, operation.device
        if index in fed:
            found[-1] = cost._replace(seconds=0.0)
        elif {source, target} <= set(devices):
            size = num_bytes(operation.node)
            seconds = links(devices.index(source), devices.index(target), size)
            found[-1] = cost._replace(seconds=seconds)
    return found


class CapturedProgram:
    """A scheduled program as one CUDA graph; gradients that the function sets are set after each replay.

    Cost: A few calls and a capture, after which state is as it was; waits for the device.
    """

    def __init__(self, program: Program, schedule: Schedule, args: tuple[Any, ...]) -> None:
        self._program = program
        # Assigning `.grad` is Python, which a replay does not do again.
        streams = StreamProgram(program.returning_grads() if program.grads else program, schedule)
        with preserved(list(program.state.values())):
            self._graph = CallGraph(streams, args)

    def __call__(self, *args: Any) -> Any:
        """The result for these arguments."""
        if not self._program.grads:
            return self._graph(*args)
        result, grads = self._graph(*args)
        self._program.set_grads(grads)
        return result

    def close(self) -> None:
        """Give up the graph. Waits for the device."""
        self._graph.close()
