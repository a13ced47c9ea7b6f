"""Where values must be copied once operations are placed on devices, and in which order all that is issued.

Pure: a placement and the values that operations read go in, an itinerary comes out: operations and
copies in issue order, with a schedule over lanes (one per device that computes, one per pair of
devices that copies).
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ridgeline.errors import ScheduleError
from ridgeline.runtime.autoparallel.dag import Dag, Edge
from ridgeline.runtime.autoparallel.schedule import Schedule, needed_syncs


class Copy(NamedTuple):
    """A value copied between devices, once for each device that needs it.

    Attributes:
        slot: The value.
        source: Device it is on.
        target: Device it goes to.
    """

    slot: int
    source: int
    target: int


class Traffic(NamedTuple):
    """What operations read and make; everything about a program that a placement's copies follow from.

    Attributes:
        reads: For each operation the slots that it reads.
        makes: For each operation the slots that it fills.
        homes: Slot of an input or of state to the device that it is on.
        as_they_are: (operation, slot) where the operation takes the value from whatever device it
            is on: it moves it itself, or reads a number that the host holds.
        crossings: Operation to the device it copies from, for those that move a value between
            devices by themselves.
    """

    reads: Sequence[Collection[int]]
    makes: Sequence[Collection[int]]
    homes: Mapping[int, int]
    as_they_are: Collection[tuple[int, int]] = ()
    crossings: Mapping[int, int] = {}


class Itinerary(NamedTuple):
    """Operations and copies in issue order.

    Attributes:
        steps: An operation's number, or a copy; step i is node i of the schedule.
        routes: For each lane the devices that it reads from and writes to; the same where it
            computes.
        schedule: Lanes and syncs of the steps.
        handed: Step to the slots that it reads on other devices without a copy, with the device
            that has them.
    """

    steps: tuple[int | Copy, ...]
    routes: tuple[tuple[int, int], ...]
    schedule: Schedule
    handed: Mapping[int, tuple[tuple[int, int], ...]]

    def step_of(self, operation: int) -> int:
        """The step that runs an operation."""
        return self.steps.index(operation)


def plan_transfers(
    dag: Dag,
    device_of: Sequence[int],
    traffic: Traffic,
    *,
    hosts: Collection[int] = (),
    starts: Sequence[float] | None = None,
) -> Itinerary:
    """The itinerary of a placement.

    A value is copied as soon as it has been issued, on the lane of its pair of devices. Operations
    are issued in the order in which the placement starts them, but those for which the host itself
    works or waits come only when nothing is left that merely needs to be enqueued.

    Args:
        dag: Who waits for whom.
        device_of: For each operation its device.
        traffic: What the operations read and make.
        hosts: Devices on which the host itself computes.
        starts: For each operation the second at which the placement starts it; None: order of the
            program.

    Raises:
        ScheduleError: an operation has no device, or reads what nobody makes.
    """
    if len(device_of) != dag.num_nodes:
        raise ScheduleError(
            f"wanted a device for each of {dag.num_nodes} operations, got {len(device_of)}; place program.dag"
        )
    owners = _owners(device_of, traffic)
    copies, handed = _needs(device_of, traffic, owners)
    order = _issue_order(dag, device_of, traffic, hosts, starts)
    steps = _with_copies(order, copies, traffic)
    place = {step: index for index, step in enumerate(steps)}
    edges = {(place[u], place[v]) for u, v in dag.edges}
    edges.update(_copy_edges(place, copies, traffic))
    lanes = [_lane(step, device_of, traffic) for step in steps]
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


def _issue_order(
    dag: Dag,
    device_of: Sequence[int],
    traffic: Traffic,
    hosts: Collection[int],
    starts: Sequence[float] | None,
) -> list[int]:
    """A topological order in which the host first enqueues what it can, and then works or waits itself."""

    def rank(operation: int) -> tuple[bool, float, int]:
        source = traffic.crossings.get(operation, device_of[operation])
        is_slow = device_of[operation] in hosts or source in hosts
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


def _with_copies(
    order: Sequence[int], copies: Mapping[Copy, Sequence[int]], traffic: Traffic
) -> list[int | Copy]:
    """The order with each copy behind what makes its value; copies of inputs go first, by need."""
    place = {operation: index for index, operation in enumerate(order)}
    by_slot: dict[int, list[Copy]] = {}
    for copy in copies:
        by_slot.setdefault(copy.slot, []).append(copy)
    from_outside = [copy for copy in copies if copy.slot in traffic.homes]
    steps: list[int | Copy] = sorted(
        from_outside, key=lambda copy: (min(place[reader] for reader in copies[copy]), copy)
    )
    for operation in order:
        steps.append(operation)
        for slot in sorted(traffic.makes[operation]):
            steps.extend(sorted(by_slot.get(slot, ())))
    return steps


def _copy_edges(
    place: Mapping[int | Copy, int], copies: Mapping[Copy, Sequence[int]], traffic: Traffic
) -> Iterable[Edge]:
    """Maker to copy, and copy to reader."""
    maker = {slot: operation for operation, slots in enumerate(traffic.makes) for slot in slots}
    for copy, readers in copies.items():
        if copy.slot in maker:
            yield place[maker[copy.slot]], place[copy]
        for reader in readers:
            yield place[copy], place[reader]


def _lane(step: int | Copy, device_of: Sequence[int], traffic: Traffic) -> tuple[int, int]:
    if isinstance(step, Copy):
        return step.source, step.target
    return traffic.crossings.get(step, device_of[step]), device_of[step]
