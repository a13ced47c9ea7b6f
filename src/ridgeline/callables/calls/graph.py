"""A function as a replayed CUDA graph: any input tensors in, fresh results out, one launch a call.

The graph copies the inputs to where it reads them, and the result is handed out. A copy of the result would
cost about as much host time as the replay, so a few graphs with memory of their own take turns: a result
is an alias of the memory of one of them, and that graph rests for as long as anybody holds the result or a
view of it. Only when all of them rest is the result of a spare graph copied.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.callables.calls.capture import CallCapture
from ridgeline.capture.capturing import on_stream, release
from ridgeline.programs.distinct_results import memory_number
from ridgeline.tensors.copies import strided_copy
from ridgeline.tensors.nests import tensors_in

WARM_UP_CALLS = 3
"""Eager calls on the capture stream: libraries make their workspaces, kernels are loaded and tuned."""
NUM_TURNS = 2
"""Graphs that take turns: in `y = f(x)` the old result lives until the new one is there."""
MOST_TURN_BYTES = 64 << 20
"""A graph that needs more memory is not made again for turns: its calls take far longer than a copy."""

_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)  # noqa: SLF001


class CallGraph:
    """A captured function; called with the original arguments of the captured shapes and dtypes.

    Results are not overwritten by later calls for as long as they, or views of them, are held. They must
    be used on the stream of the call, or dropped only after other streams are done with them, since
    `record_stream` does not know this memory.

    Args:
        fn: The function, without gradients.
        args: Example arguments; their tensors' values serve the warm-up.
        static_io: The caller writes into `inputs`; results are overwritten by the next call.

    Attributes:
        inputs: The arguments with the tensors that the graph reads.
        owns_results: Whether no result lies in the memory of these, where the next call writes.

    Raises:
        CaptureError: the capture failed.

    Cost: A few eager calls and captures; waits for the device.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], *, static_io: bool = False
    ) -> None:
        leaves, structure = pytree.tree_flatten(args)
        static = [strided_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tensors = [leaf for leaf in static if isinstance(leaf, Tensor)]
        self.inputs: tuple[Any, ...] = pytree.tree_unflatten(static, structure)
        self._is_flat = all(isinstance(arg, Tensor) for arg in args)
        self._device = _device_of(self._tensors)
        self._stream = torch.cuda.Stream(self._device)
        self._last_stream = -1
        # On the capture's stream: cuBLAS has a workspace for each stream, and allocates it with the first
        # call.
        self._warm_up(fn)
        # Reserved, not allocated: a capture keeps whole blocks of its pool, whether it uses them or not.
        before = torch.cuda.memory_reserved(self._device)
        # A graph's own copies are of bytes, so they need dense memory.
        copies = not static_io and all(t.clone().stride() == t.stride() for t in self._tensors)
        self._spare = self._capture(fn, copies=copies)
        num_bytes = torch.cuda.memory_reserved(self._device) - before
        self._turns: list[CallCapture] = []
        self.owns_results = self._owns(self._spare.tensors)
        if not static_io and num_bytes <= MOST_TURN_BYTES and self.owns_results:
            self._turns = [self._capture(fn, copies=copies) for _ in range(NUM_TURNS)]
        graphs = [capture.graph for capture in (self._spare, *self._turns)]
        # Given the graphs alone: a reference to this object would keep it from ever being collected.
        self._finalizer = weakref.finalize(self, release, graphs)
        self.replay: Callable[[], Any] = self._spare.replayer()
        """With `static_io`: replays on what `inputs` hold; the result is overwritten by the next call."""

    def __call__(self, *args: Any) -> Any:
        """One call: copy in, replay, hand out.

        Cost: One launch; a second one where all graphs that take turns have their results held.
        """
        stream = _stream_of(self._device.index)
        # Raw numbers: a stream object made by torch in each call would cost the host more.
        if stream != self._last_stream:
            self._follow(stream)
        given = args if self._is_flat else tensors_in(args)
        for capture in self._turns:
            if capture.is_free():
                capture.launch(*given)
                return capture.aliases()
        self._spare.launch(*given)
        return self._spare.copies()

    def close(self) -> None:
        """Drop the graphs. Results that are still held stay valid.

        Cost: Waits for the device.
        """
        if self._finalizer.alive:
            # A replay that still runs would write into memory that is given back.
            torch.cuda.synchronize(self._device)
            self._finalizer()

    def _capture(self, fn: Callable[..., Any], *, copies: bool) -> CallCapture:
        return CallCapture(fn, self.inputs, self._stream, copies=copies)

    def _warm_up(self, fn: Callable[..., Any]) -> None:
        with on_stream(self._stream, self._device):
            for _ in range(WARM_UP_CALLS):
                fn(*self.inputs)

    def _follow(self, stream: int) -> None:
        """Order the calls on a new current stream after those on the one before: they share memory."""
        if self._last_stream >= 0:
            before = torch.cuda.ExternalStream(self._last_stream, device=self._device)
            torch.cuda.current_stream(self._device).wait_stream(before)
        self._last_stream = stream

    def _owns(self, results: list[Tensor]) -> bool:
        inputs = {memory_number(tensor) for tensor in self._tensors} - {None}
        return not any(memory_number(tensor) in inputs for tensor in results)


def capture_once(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Capture a function and replay it; what a child process does to find out whether that works.

    Raises:
        CaptureError: the capture failed.
    """
    with torch.no_grad():
        graph = CallGraph(fn, args)
        graph(*args)
        graph.close()


def _device_of(tensors: list[Tensor]) -> torch.device:
    index = next((t.device.index for t in tensors if t.is_cuda), torch.cuda.current_device())
    return torch.device("cuda", index)
