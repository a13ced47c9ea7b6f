"""The bookkeeping of captured callables, with graphs that stand in for CUDA's: who is replayed, what is copied."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.runtime.hybrid.calls import graph as call_graph
from ridgeline.runtime.hybrid.calls.graph import NUM_TURNS, CallGraph
from ridgeline.runtime.hybrid.calls.places import RECURRENCES, Places


class StandIn:
    """A graph: what was captured is run again, on the same memory."""

    capturing: "StandIn | None" = None
    replays = 0
    made: "list[weakref.ref[StandIn]]" = []

    def __init__(self) -> None:
        StandIn.made.append(weakref.ref(self))
        self.work: list[Callable[[], object]] = []
        self.is_reset = False

    def replay(self) -> None:
        StandIn.replays += 1
        for run in self.work:
            run()

    def reset(self) -> None:
        self.is_reset = True


class Stream:
    """A stream that has nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        self.waits: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waits.append(other)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """torch.cuda as far as a captured callable needs it; the current stream can be set."""
    state = {"stream": 0}

    @contextlib.contextmanager
    def capture(graph: StandIn, **_: object) -> Iterator[None]:
        StandIn.capturing = graph
        yield
        StandIn.capturing = None

    current = Stream()
    for name, stand_in in {
        "CUDAGraph": StandIn,
        "graph": capture,
        "Stream": Stream,
        "ExternalStream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: current,
        "current_device": lambda: 0,
        "memory_reserved": lambda *_: 0,
        "synchronize": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(call_graph, "_stream_of", lambda _index: state["stream"])
    monkeypatch.setattr(Places, "can_serve", staticmethod(bool))
    StandIn.replays = 0
    StandIn.made.clear()
    yield state
    assert StandIn.capturing is None


class Doubler:
    """`2 x`, and the addresses that it was captured on."""

    def __init__(self) -> None:
        self.captured: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        result = 2 * x
        if StandIn.capturing is not None:
            self.captured.append(x.data_ptr())
            StandIn.capturing.work.append(lambda: result.copy_(2 * x))
        return result


def test_results_are_right_and_never_overwritten() -> None:
    """Whatever is held: the example, other tensors, and more results than there are graphs."""
    call = CallGraph(Doubler(), (torch.randn(4),))
    held = [(x, call(x)) for x in torch.randn(5 * NUM_TURNS, 4).unbind()]
    for x, got in held:
        torch.testing.assert_close(got, 2 * x)
    assert StandIn.replays == len(held)


def test_the_example_is_read_where_it_is() -> None:
    """Its graphs were captured on it; values written into it later count, and nothing is copied."""
    fn, x = Doubler(), torch.zeros(4)
    call = CallGraph(fn, (x,))
    assert fn.captured.count(x.data_ptr()) == NUM_TURNS
    before = call.inputs[0].clone()
    x.fill_(3.0)
    torch.testing.assert_close(call(x), torch.full((4,), 6.0))
    torch.testing.assert_close(call.inputs[0], before)


def test_a_ring_gets_graphs_of_its_own() -> None:
    """After some turns its slots are no longer copied; another layout at the same address is."""
    fn, ring = Doubler(), [torch.zeros(3, 3) for _ in range(2)]
    call = CallGraph(fn, (torch.randn(3, 3),))
    for turn in range(2 * RECURRENCES):
        slot = ring[turn % 2]
        slot.fill_(float(turn))
        torch.testing.assert_close(call(slot), torch.full((3, 3), 2.0 * turn))
    captured = len(fn.captured)
    call.inputs[0].fill_(-1.0)
    for slot in ring:
        assert fn.captured.count(slot.data_ptr()) == NUM_TURNS
        torch.testing.assert_close(call(slot), 2 * slot)
    assert bool((call.inputs[0] == -1.0).all()), "nothing was copied"
    ring[0].copy_(torch.arange(9.0).view(3, 3))
    torch.testing.assert_close(call(ring[0].t()), 2 * ring[0].t())
    assert len(fn.captured) == captured


def test_calls_on_another_stream_wait_before_they_copy(device: dict[str, int]) -> None:
    """The graph that still runs on the old stream reads what the copy would overwrite."""
    call = CallGraph(Doubler(), (torch.randn(4),))
    call(torch.randn(4))
    stream: Any = torch.cuda.current_stream()
    seen: list[int] = []
    load = call.load
    call.load = lambda *args: (seen.append(len(stream.waits)), load(*args))[1]  # type: ignore[method-assign]
    waits = len(stream.waits)
    device["stream"] = 7
    call(torch.randn(4))
    assert seen == [waits + 1]


def test_a_callable_that_nobody_holds_gives_its_graphs_up_at_once() -> None:
    """Without waiting for the garbage collector; those of places as well."""
    fn, x, y = Doubler(), torch.randn(4), torch.randn(4)
    call = CallGraph(fn, (x,))
    for _ in range(RECURRENCES):
        call(y)
    assert len(StandIn.made) == 1 + 3 * NUM_TURNS
    gc.disable()
    try:
        alive = weakref.ref(call)
        del call
        assert alive() is None
        left = [graph for made in StandIn.made if (graph := made()) is not None]
        assert all(graph.is_reset for graph in left)
    finally:
        gc.enable()
