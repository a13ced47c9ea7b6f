"""The bookkeeping of captured callables, with graphs that stand in for CUDA's: who is replayed, what is copied."""

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.callables.calls import capture as call_capture
from ridgeline.callables.calls import graph as call_graph
from ridgeline.callables.calls.graph import NUM_TURNS, CallGraph


class StandIn:
    """A graph: what was captured is run again, on the same memory."""

    capturing: "StandIn | None" = None
    replays = 0
    made: "list[weakref.ref[StandIn]]" = []

    def __init__(self, keep_graph: bool = False) -> None:
        StandIn.made.append(weakref.ref(self))
        self.work: list[Callable[[], object]] = []
        self.is_reset = False
        self.sources: list[int] = []
        self.redirected = 0

    def instantiate(self) -> None:
        """Nothing to do."""

    def redirections(self, inputs: Sequence[Tensor]) -> list[Callable[[int], None]]:
        """The copies that it begins with, each from an address that can be changed."""
        self.sources = [0 for _ in inputs]
        return [partial(self._redirect, index, x) for index, x in enumerate(inputs)]

    def _redirect(self, index: int, target: Tensor, address: int) -> None:
        if not self.sources[index]:
            self.work.insert(0, lambda: self._copy(index, target))
        self.sources[index] = address
        self.redirected += 1

    def _copy(self, index: int, target: Tensor) -> None:
        num_bytes = target.numel() * target.element_size()
        ctypes.memmove(target.data_ptr(), self.sources[index], num_bytes)

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
        "graph_pool_handle": lambda: (0, 0),
        "graph": capture,
        "Stream": Stream,
        "ExternalStream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: current,
        "set_stream": lambda _: None,
        "current_device": lambda: 0,
        "memory_reserved": lambda *_: 0,
        "synchronize": lambda *_: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(call_graph, "_stream_of", lambda _index: state["stream"])
    monkeypatch.setattr(call_capture, "can_redirect", bool)
    monkeypatch.setattr(call_capture, "redirections", StandIn.redirections)
    StandIn.replays = 0
    StandIn.made.clear()
    yield state
    assert StandIn.capturing is None


def double(x: Tensor) -> Tensor:
    """`2 x`, also when it is replayed."""
    result = 2 * x
    if StandIn.capturing is not None:
        StandIn.capturing.work.append(lambda: result.copy_(2 * x))
    return result


def add(x: Tensor, more: dict[str, Tensor]) -> Tensor:
    """Of arguments in a structure."""
    result = x + more["y"]
    if StandIn.capturing is not None:
        StandIn.capturing.work.append(lambda: result.copy_(x + more["y"]))
    return result


def redirected() -> int:
    """How often graphs were told to copy from another address."""
    return sum(graph.redirected for made in StandIn.made if (graph := made()) is not None)


def test_results_are_right_and_never_overwritten() -> None:
    """Whatever is held: the example, other tensors, and more results than there are graphs."""
    call = CallGraph(double, (torch.randn(4),))
    held = [(x, call(x)) for x in torch.randn(5 * NUM_TURNS, 4).unbind()]
    for x, got in held:
        torch.testing.assert_close(got, 2 * x)
    assert StandIn.replays == len(held)


def test_arguments_are_read_where_they_are() -> None:
    """In any structure, and a graph is told of an address only when it is another one than before."""
    call = CallGraph(add, (torch.zeros(4), {"y": torch.zeros(4)}))
    pairs = [(torch.randn(4), torch.randn(4)) for _ in range(3)]
    for x, y in pairs:
        torch.testing.assert_close(call(x, {"y": y}), x + y)
    assert redirected() == 2 * len(pairs)
    x, y = pairs[-1]
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(call(x, {"y": y}), x + y)
    assert redirected() == 2 * len(pairs)
    torch.testing.assert_close(call(x, {"y": pairs[0][1]}), x + pairs[0][1])
    assert redirected() == 2 * len(pairs) + 1


def test_another_layout_is_copied_first() -> None:
    """A graph copies bytes: columns for rows, a sign or a conjugate that is only noted would be wrong."""
    square = torch.randn(3, 3)
    call = CallGraph(double, (square,))
    for x in (square, square.t(), torch._neg_view(square), torch.randn(3, 6)[:, ::2], square):
        torch.testing.assert_close(call(x), 2 * x)
    number = torch.randn(3, dtype=torch.complex64)
    call = CallGraph(double, (number,))
    for x in (number, number.conj(), number):
        torch.testing.assert_close(call(x), 2 * x)


def test_where_graphs_cannot_be_told_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another runtime than CUDA's, or nothing to copy."""
    monkeypatch.setattr(call_capture, "can_redirect", lambda _: False)
    call = CallGraph(add, (torch.zeros(4), {"y": torch.zeros(4)}))
    for x, y in torch.randn(5, 2, 4).unbind():
        torch.testing.assert_close(call(x, {"y": y}), x + y)
    assert redirected() == 0
    ones = torch.ones(2)
    assert bool((CallGraph(lambda: double(ones), ())() == 2.0).all())


def test_calls_on_another_stream_wait_before_they_copy(device: dict[str, int]) -> None:
    """The graph that still runs on the old stream reads what the copy would overwrite."""
    call = CallGraph(double, (torch.randn(4),))
    call(torch.randn(4))
    stream: Any = torch.cuda.current_stream()
    waits, seen = len(stream.waits), []
    for made in StandIn.made:
        graph = made()
        assert graph is not None
        graph.work.insert(0, lambda: seen.append(len(stream.waits)))
    device["stream"] = 7
    call(torch.randn(4))
    assert seen == [waits + 1]


def test_a_callable_that_nobody_holds_gives_its_graphs_up_at_once() -> None:
    """Without waiting for the garbage collector."""
    call = CallGraph(double, (torch.randn(4),))
    call(torch.randn(4))
    assert len(StandIn.made) == 1 + NUM_TURNS
    gc.disable()
    try:
        alive = weakref.ref(call)
        del call
        assert alive() is None
        left = [graph for made in StandIn.made if (graph := made()) is not None]
        assert all(graph.is_reset for graph in left)
    finally:
        gc.enable()
