"""Where values must be copied once operations are placed on devices, and in which order all that is issued.

Pure: a placement and the values that operations read go in, an itinerary comes out: operations and copies in
issue order, with a schedule over lanes (one per device that computes, one per pair of devices that copies).

What lands in host memory from a device is there only once the device says so, and no stream can hold
the host back: what reads it, on whatever lane, comes after an arrival, for which the host waits.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ridgeline.autoparallel.graphs.dag import Dag, Edge
from ridgeline.autoparallel.scheduling.schedule import Schedule, needed_syncs
from ridgeline.autoparallel.scheduling.traffic import Arrival, Copy, Step, Traffic
from ridgeline.errors import ScheduleError


class Itinerary(NamedTuple):
    """Operations, copies and arrivals in issue order.

    Attributes:
        steps: Step i is node i of the schedule.
        routes: For each lane the devices that it reads from and writes to; the same where it computes.
        schedule: Lanes and syncs of the steps.
        handed: Step to the slots, with their device, that it reads on other devices without a copy.
    """

    steps: tuple[Step, ...]
    routes: tuple[tuple[int, int], ...]
    schedule: Schedule
    handed: Mapping[int, tuple[tuple[int, int], ...]]


def plan_transfers(
    dag: Dag,
    device_of: Sequence[int],
    traffic: Traffic,
    *,
    hosts: Collection[int] = (),
    starts: Sequence[float] | None = None,
) -> Itinerary:
    """The itinerary of a placement.

    A value is copied, or moved, as soon as it has been issued, on the lane of its pair of devices.
    Operations are issued in the order in which the placement starts them, but those for which the host
    itself works or waits come only when nothing is left that merely needs to be enqueued. What lands in
    host memory arrives just before it is first read, or at the end if only the caller reads it.

    On `hosts` the host itself computes. `starts` are the seconds at which the placement starts operations;
    None: the order of the program.

    Raises:
        ScheduleError: an operation has no device, or reads what no operation makes.
    """
    if len(device_of) != dag.num_nodes:
        raise ScheduleError(
            f"wanted a device for each of {dag.num_nodes} operations, got {len(device_of)}; place program.dag"
        )
    owners = _owners(device_of, traffic)
    copies, handed = _needs(device_of, traffic, owners)
    landings = _landings(dag, device_of, traffic, copies, hosts)
    # One thread issues everything: while the host computes or waits, no device gets work.
    order = _issue_order(dag, device_of, traffic, hosts, starts, _behind(landings, copies))
    steps = _steps(order, copies, landings, traffic)
    place = {step: index for index, step in enumerate(steps)}
    edges = {(place[u], place[v]) for u, v in dag.edges}
    edges.update(_copy_edges(place, copies, traffic))
    edges.update(_arrival_edges(place, landings))
    lanes = [_lane(step, device_of, traffic) for step in steps]
    # Lanes that compute first, so that lane numbers do not depend on the order of the copies.
    routes = sorted(set(lanes), key=lambda route: (route[0] != route[1], route))
    lane_of = tuple(routes.index(lane) for lane in lanes)
    numbers = tuple(range(len(steps)))
    extended = Dag.of(len(steps), edges)
    schedule = Schedule(
        lanes=tuple(f"compute:{s}" if s == t else f"copy:{s}-{t}" for s, t in routes),
        lane_of=lane_of,
        order=numbers,
        syncs=needed_syncs(extended, lane_of, numbers),
    )
    by_step = {place[operation]: found for operation, found in handed.items()}
    return Itinerary(tuple(steps), tuple(routes), schedule, by_step)


def _owners(device_of: Sequence[int], traffic: Traffic) -> dict[int, int]:
    """Slot to the device that it is on."""
    owners = dict(traffic.homes)
    for operation, slots in enumerate(traffic.makes):
        owners.update(dict.fromkeys(slots, device_of[operation]))
    return owners


def _needs(
    device_of: Sequence[int], traffic: Traffic, owners: Mapping[int, int]
) -> tuple[dict[Copy, list[int]], dict[int, tuple[tuple[int, int], ...]]]:
    """Copies with the operations that need them, and what is handed over without one."""
    copies: dict[Copy, list[int]] = {}
    handed: dict[int, tuple[tuple[int, int], ...]] = {}
    for operation, slots in enumerate(traffic.reads):
        for slot in slots:
            if slot not in owners:
                raise ScheduleError(
                    f"wanted every value to come from an operation, an input or state, got slot {slot} "
                    f"read by operation {operation}; this is a fault of the traced program, please report it"
                )
            source, target = owners[slot], device_of[operation]
            if source == target:
                continue
            if (operation, slot) in traffic.as_they_are:
                handed[operation] = (*handed.get(operation, ()), (slot, source))
            else:
                copies.setdefault(Copy(slot, source, target), []).append(operation)
    return copies, handed


def _landings(
    dag: Dag,
    device_of: Sequence[int],
    traffic: Traffic,
    copies: Mapping[Copy, Sequence[int]],
    hosts: Collection[int],
) -> dict[int | Copy, list[int | Copy]]:
    """What comes into the memory of the host from a device, with the steps that read it there."""
    found: dict[int | Copy, list[int | Copy]] = {
        copy: list(readers)
        for copy, readers in copies.items()
        if copy.target in hosts and copy.source not in hosts
    }
    children = dag.children()
    for operation, source in traffic.crossings.items():
        if device_of[operation] in hosts and source not in hosts:
            slots = set(traffic.makes[operation])
            found[operation] = [
                *(
                    child
                    for child in children[operation]
                    if slots.intersection(traffic.reads[child])
                ),
                *(copy for copy in copies if copy.slot in slots),
            ]
    return found


def _behind(
    landings: Mapping[int | Copy, Sequence[int | Copy]], copies: Mapping[Copy, Sequence[int]]
) -> set[int]:
    """Operations that come after an arrival."""
    found: set[int] = set()
    for readers in landings.values():
        for reader in readers:
            found.update(copies[reader] if isinstance(reader, Copy) else (reader,))
    return found


def _issue_order(
    dag: Dag,
    device_of: Sequence[int],
    traffic: Traffic,
    hosts: Collection[int],
    starts: Sequence[float] | None,
    behind: Collection[int],
) -> list[int]:
    """A topological order in which the host first enqueues what it can, and then works or waits itself."""

    def rank(operation: int) -> tuple[bool, float, int]:
        if operation in traffic.moves:
            # At once: the copy only has to be enqueued, and the host computes on while it is under way.
            return False, -math.inf, operation
        source = traffic.crossings.get(operation, device_of[operation])
        is_slow = device_of[operation] in hosts or source in hosts or operation in behind
        return is_slow, starts[operation] if starts else 0.0, operation

    missing = [len(parents) for parents in dag.parents()]
    children = dag.children()
    ready = [rank(node) for node, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        *_, node = heapq.heappop(ready)
        order.append(node)
        for child in children[node]:
            missing[child] -= 1
            if not missing[child]:
                heapq.heappush(ready, rank(child))
    return order


def _steps(
    order: Sequence[int],
    copies: Mapping[Copy, Sequence[int]],
    landings: Mapping[int | Copy, Sequence[int | Copy]],
    traffic: Traffic,
) -> list[Step]:
    """The order with copies, as early as their values are there, and arrivals, as late as they are needed."""
    place = {operation: index for index, operation in enumerate(order)}
    first_reader = {copy: min(map(place.__getitem__, readers)) for copy, readers in copies.items()}
    landed: dict[int | Copy, list[int | Copy]] = {}
    for landing, readers in landings.items():
        for reader in readers:
            landed.setdefault(reader, []).append(landing)
    by_slot: dict[int, list[Copy]] = {}
    late: dict[int, list[Copy]] = {}
    for copy in sorted(copies):
        if copy in landed:
            late.setdefault(first_reader[copy], []).append(copy)
        elif copy.slot not in traffic.homes:
            by_slot.setdefault(copy.slot, []).append(copy)
    from_outside = (copy for copy in copies if copy.slot in traffic.homes)
    steps: list[Step] = []
    returned: list[Step] = []
    steps += sorted(from_outside, key=lambda copy: (first_reader[copy], copy))
    for index, operation in enumerate(order):
        for step in (*late.get(index, ()), operation):
            steps += [Arrival(landing) for landing in landed.get(step, ())]
            steps.append(step)
        for slot in sorted(traffic.makes[operation]):
            steps += by_slot.get(slot, ())
        # The caller reads host memory without asking a stream, so it has to be there on return.
        if operation in landings and not traffic.results.isdisjoint(traffic.makes[operation]):
            returned.append(Arrival(operation))
    # Only the first wait for a landing is one.
    return list(dict.fromkeys([*steps, *returned]))


def _copy_edges(
    place: Mapping[Step, int], copies: Mapping[Copy, Sequence[int]], traffic: Traffic
) -> Iterable[Edge]:
    """Maker to copy, and copy to reader."""
    maker = {slot: operation for operation, slots in enumerate(traffic.makes) for slot in slots}
    for copy, readers in copies.items():
        if copy.slot in maker:
            yield place[maker[copy.slot]], place[copy]
        for reader in readers:
            yield place[copy], place[reader]


def _arrival_edges(
    place: Mapping[Step, int], landings: Mapping[int | Copy, Sequence[int | Copy]]
) -> Iterable[Edge]:
    """Landing to arrival, and arrival to reader."""
    for landing, readers in landings.items():
        arrival = place.get(Arrival(landing))
        if arrival is not None:
            yield place[landing], arrival
            for reader in readers:
                yield arrival, place[reader]


def _lane(step: Step, device_of: Sequence[int], traffic: Traffic) -> tuple[int, int]:
    if isinstance(step, Copy):
        return step.source, step.target
    if isinstance(step, Arrival):
        target = step.of.target if isinstance(step.of, Copy) else device_of[step.of]
        return target, target
    return traffic.crossings.get(step, device_of[step]), device_of[step]
