"""A program over several devices: each operation where it was placed, copies beside the computing."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.autoparallel.graphs.moves import compile_move, is_move
from ridgeline.autoparallel.graphs.program import Program
from ridgeline.autoparallel.graphs.segments import Environment, Segment
from ridgeline.autoparallel.lanes.cuda_lanes import CudaLanes, Route
from ridgeline.autoparallel.lanes.issue import IssuedPiece, Lanes, carry_out, pieces
from ridgeline.autoparallel.scheduling.placement import Placement
from ridgeline.autoparallel.scheduling.traffic import Arrival, Copy, Traffic
from ridgeline.autoparallel.scheduling.transfers import Itinerary, plan_transfers
from ridgeline.errors import ScheduleError
from ridgeline.tensors.nests import tensors_in

Work = Callable[[list[Environment]], None]
"""What a piece does; the environments are those of the devices."""


class DeviceProgram:
    """A program whose operations run on the devices of a placement; called like the traced function.

    Devices compute on the caller's current streams; values travel on streams of their own
    meanwhile. Results are on the devices that the placement gives them, valid on the current stream
    there. What the function moves from a GPU to the CPU goes into pinned memory while the host does
    other work; as a result it is complete, and pinned. State that is needed on another device is
    copied at every call, so updates of it are seen. Calls do not compute gradients.

    Args:
        program: Its inputs and state are on some of the devices.
        placement: Made for the program's dag; an update in place stays on the device of what it updates.
        devices: Device i of the placement.
        lanes: What carries it out; default: streams of the devices.

    Raises:
        ScheduleError: the placement is for another program, lacks a device, or moves an update in place.
    """

    def __init__(
        self,
        program: Program,
        placement: Placement,
        devices: Sequence[torch.device | str],
        *,
        lanes: Lanes | None = None,
    ) -> None:
        self.program = program
        if max(placement.device_of, default=0) >= len(devices):
            raise ScheduleError(
                f"wanted the {max(placement.device_of) + 1} devices of the placement, got {len(devices)} "
                "devices; give them in the order in which they were placed"
            )
        self._devices = _with_sources([torch.device(device) for device in devices], program)
        traffic = traffic_of(program, placement.device_of, self._devices)
        _check_updates(program, placement.device_of, self._devices)
        itinerary = plan_transfers(
            program.dag,
            placement.device_of,
            traffic,
            hosts=[i for i, device in enumerate(self._devices) if device.type == "cpu"],
            starts=placement.starts,
        )
        self.schedule = itinerary.schedule
        self.copies = tuple(step for step in itinerary.steps if isinstance(step, Copy))
        routes = [
            Route(self._devices[source], self._devices[target], is_own=source != target)
            for source, target in itinerary.routes
        ]
        self._lanes = lanes or CudaLanes(routes, len(itinerary.steps))
        handed = {slot for found in itinerary.handed.values() for slot, _ in found}
        self._moves = frozenset(traffic.moves)
        self._kept = program.crosses(placement.device_of) | handed | {c.slot for c in self.copies}
        self._work = [
            (piece, self._work_of(piece, itinerary)) for piece in pieces(itinerary.schedule)
        ]
        owner = {
            slot: device
            for slots, device in zip(traffic.makes, placement.device_of, strict=True)
            for slot in slots
        }
        self._outputs = [(slot, owner[slot]) for slot in program.outputs if slot in owner]

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """The result, on the devices of the placement.

        Cost: Enqueues. The host waits for what comes from a GPU to the CPU when the CPU needs it or it
            is a result, for values that the function itself moves from the CPU, or with a change of the
            dtype to it, and for copies of pinned memory.
        """
        environments: list[Environment] = [self.program.bind(*args)]
        # One for each device: a slot holds the original on one and its copy on another.
        environments += [list(environments[0]) for _ in self._devices[1:]]
        carry_out(self._lanes, self._work, environments)
        for slot, device in self._outputs:
            environments[0][slot] = environments[device][slot]
        return self.program.results(environments[0])

    def _work_of(self, piece: IssuedPiece, itinerary: Itinerary) -> Work:
        """Copies of a copying lane, or operations; a lane of a pair of devices may have both, by turns."""
        found: list[Work] = []
        target = itinerary.routes[piece.lane][1]
        operations: list[int] = []
        for step in piece.nodes:
            what = itinerary.steps[step]
            for slot, source in itinerary.handed.get(step, ()):
                found.append(_hand(slot, source, target))
            if isinstance(what, Arrival):
                continue  # The lane has waited; there is nothing else to do.
            if isinstance(what, int) and what not in self._moves:
                operations.append(what)
                continue
            found += self._segments(operations, target)
            operations = []
            if isinstance(what, Copy):
                found.append(_copy(what, self._devices[what.target]))
            else:
                found.append(_on(target, compile_move(self.program, what, self._kept)))
        found += self._segments(operations, target)
        return found[0] if len(found) == 1 else _in_turn(found)

    def _segments(self, operations: list[int], target: int) -> list[Work]:
        """Operations of one lane, split by the device on which they were traced: they make tensors there."""
        found: list[Work] = []
        for _, part in itertools.groupby(operations, lambda i: self.program.operations[i].device):
            # By device of the trace, since a segment exchanges one device for one other.
            segment = self.program.segment(
                list(part), keep=self._kept, device=self._devices[target]
            )
            found.append(_on(target, segment))
        return found


def traffic_of(
    program: Program, device_of: Sequence[int], devices: Sequence[torch.device]
) -> Traffic:
    """What the operations of a program read and make, and which move values between devices themselves.

    Raises:
        ScheduleError: an input or state is on none of the devices.
    """
    # Reversed, so that of a device that is named twice the first place counts.
    number = {device: index for index, device in reversed(list(enumerate(devices)))}
    nodes = list(program.graph.graph.nodes)
    homes: dict[int, int] = {}
    for slot, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr"):
            device = _device_of(node)
            if device is not None and device not in number:
                raise ScheduleError(
                    f"wanted inputs and state on the devices {', '.join(map(str, devices))}, got "
                    f"{node.name} on {device}; add {device} to devices, or move the tensor"
                )
            homes[slot] = 0 if device is None else number[device]
    makes = [operation.makes for operation in program.operations]
    owner = homes | {slot: device_of[index] for index, slots in enumerate(makes) for slot in slots}
    as_they_are: set[tuple[int, int]] = set()
    crossings: dict[int, int] = {}
    for index, operation in enumerate(program.operations):
        for slot in operation.reads:
            if _device_of(nodes[slot]) in (operation.device, None):
                continue
            as_they_are.add((index, slot))
            # A number on the CPU may be an argument of any operator on a GPU; only alone is it what is moved.
            if not _is_number(nodes[slot]) or len(operation.reads) == 1:
                crossings[index] = owner[slot]
    moves = frozenset(
        index
        for index, source in crossings.items()
        if devices[source].type != "cpu"
        and devices[device_of[index]].type == "cpu"
        and is_move(program.operations[index].node)
    )
    reads = [operation.reads for operation in program.operations]
    return Traffic(reads, makes, homes, as_they_are, crossings, moves, frozenset(program.outputs))


def _check_updates(
    program: Program, device_of: Sequence[int], devices: Sequence[torch.device]
) -> None:
    """What is written in place stays where it is: a write into a copy would be lost."""
    for index in sorted(program.in_place):
        operation = program.operations[index]
        placed = devices[device_of[index]]
        if placed != operation.device:
            raise ScheduleError(
                f"wanted {operation.node.name}, which touches memory that is written in place, on "
                f"{operation.device}, got {placed}; pin the operations of program.in_place to their devices"
            )


def _on(device: int, segment: Segment) -> Work:
    def work(environments: list[Environment]) -> None:
        segment(environments[device])

    return work


def _hand(slot: int, source: int, target: int) -> Work:
    def work(environments: list[Environment]) -> None:
        environments[target][slot] = environments[source][slot]

    return work


def _copy(copy: Copy, device: torch.device) -> Work:
    slot, source, target = copy

    def work(environments: list[Environment]) -> None:
        value = environments[source][slot]
        # The caller may overwrite pinned memory after the call, so its copy must be over by then;
        # memory that is not pinned has been read when the copy has been issued.
        is_free = not (value.device.type == "cpu" and value.is_pinned())
        environments[target][slot] = value.to(device, non_blocking=is_free, copy=True)

    return work


def _in_turn(works: list[Work]) -> Work:
    def work(environments: list[Environment]) -> None:
        for each in works:
            each(environments)

    return work


def _with_sources(devices: list[torch.device], program: Program) -> list[torch.device]:
    """The devices of the placement, and those on which nothing runs but inputs or state are."""
    found = [with_index(device) for device in devices]
    sources = dict.fromkeys(tensor.device for tensor in (*program.state.values(), *program.inputs))
    return [*found, *(device for device in sources if device not in found)]


def with_index(device: torch.device) -> torch.device:
    """`cuda` as the current GPU: devices of tensors have an index, and are compared with it."""
    if device.type != "cuda" or device.index is not None:
        return device
    # Without a GPU there is no current one; who moves something there is told so by torch.
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _device_of(node: fx.Node) -> torch.device | None:
    found = tensors_in(node.meta.get("val"))
    return found[0].device if found else None


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0
