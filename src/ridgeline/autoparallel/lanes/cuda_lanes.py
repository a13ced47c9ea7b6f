"""Lanes as CUDA streams: who waits for whom becomes events, and the host only enqueues."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Route(NamedTuple):
    """Where a lane works.

    A lane that computes has one device. One that copies reads from one device and writes to
    another: between two GPUs it needs a stream on each, since a copy is ordered on both sides.

    Attributes:
        source: Device that is read from; waits take place there.
        target: Device that is written to; signals come from there.
        is_own: Whether the lane has streams of its own; else it is the caller's current stream.
    """

    source: torch.device
    target: torch.device
    is_own: bool = True


class CudaLanes:
    """Streams of one device or of several, and host lanes for work on the CPU.

    Lanes of their own are forked from the caller's current stream on their device and joined to it, so a call
    is ordered like a single operator. Under capture the same calls record the branches of one CUDA graph.
    """

    def __init__(self, routes: Sequence[Route], num_nodes: int) -> None:
        self._devices = sorted(
            {d for route in routes for d in (route.source, route.target) if d.type == "cuda"},
            key=lambda device: device.index,
        )
        self._routes = tuple(routes)
        # Streams are made once: torch hands out the same 32 by turns, and new ones could be another lane's.
        self._own = [_streams_of(route) if route.is_own else () for route in routes]
        # Events are made once: making one costs the host more than recording it.
        self._forks = {device: torch.cuda.Event() for device in self._devices}
        self._ends = {stream: torch.cuda.Event() for own in self._own for stream in own}
        self._events: list[torch.cuda.Event | None] = [None] * num_nodes
        self._current: dict[torch.device, torch.cuda.Stream] = {}
        self._entered: tuple[torch.cuda.Stream, ...] = ()
        self._home = 0

    def fork(self) -> None:
        """Order every lane after what the caller has enqueued on the lane's device."""
        self._home = torch.cuda.current_device()
        for device in self._devices:
            current = torch.cuda.current_stream(device)
            self._current[device] = current
            self._forks[device].record(current)
        # Also lanes that run nothing in this call: under capture a stream that was not forked could not be
        # joined.
        for stream in self._ends:
            stream.wait_event(self._forks[stream.device])

    def enter(self, lane: int) -> None:
        """Make the lane's streams the current ones of their devices."""
        route = self._routes[lane]
        streams = self._own[lane]
        if not route.is_own and route.target.type == "cuda":
            streams = (self._current[route.target],)
        for stream in streams:
            torch.cuda.set_stream(stream)
        self._entered = streams

    def wait(self, node: int) -> None:
        """Wait for a node: on the device, or on the host where the entered lane computes on the CPU."""
        event = self._events[node]
        if event is None:
            return  # A node on the CPU is done when it has been issued.
        if self._entered:
            # The first is that of the source: a copy between two GPUs begins there.
            self._entered[0].wait_event(event)
        else:
            event.synchronize()

    def signal(self, node: int) -> None:
        """Record the node's event."""
        if self._entered:
            event = self._events[node]
            if event is None:
                event = self._events[node] = torch.cuda.Event()
            # The last is that of the target, where a copy is complete.
            event.record(self._entered[-1])

    def join(self) -> None:
        """Order the caller's streams after all lanes of their devices, and make them current again."""
        for stream, event in self._ends.items():
            event.record(stream)
            self._current[stream.device].wait_event(event)
        for current in self._current.values():
            torch.cuda.set_stream(current)
        self._entered = ()
        # Setting a stream also makes its device the current one.
        torch.cuda.set_device(self._home)


def _streams_of(route: Route) -> tuple[torch.cuda.Stream, ...]:
    """Streams on the lane's devices, the source first: what is set last is the current device."""
    devices = dict.fromkeys(d for d in (route.source, route.target) if d.type == "cuda")
    return tuple(torch.cuda.Stream(device) for device in devices)
