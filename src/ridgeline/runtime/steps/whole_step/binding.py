"""A compiled step program bound to its state; on a GPU captured, and replayed as one CUDA graph."""

import gc
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.capture.capturing import capturing, on_stream
from ridgeline.errors import CaptureError
from ridgeline.state.saved_state import preserved
from ridgeline.tensors.copies import copy_into, is_noted

Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""A compiled program: all inputs as one flat list, which it may empty; its outputs."""

WARMUP_CALLS = 2
"""Calls before a capture: Triton loads its kernels and libraries settle."""


class BoundStep:
    """A compiled program with its state, on the CPU: `loss, *others = step(tensors of a batch)`.

    Args:
        call: The program.
        state: Its first inputs; written in place.
        examples: Batch tensors as it was compiled for; their strides count.
        written: Places of those that it writes.
    """

    def __init__(
        self,
        call: Call,
        state: Sequence[Tensor],
        examples: Sequence[Tensor],
        written: Sequence[int] = (),
    ) -> None:
        self._call = call
        self._written = written
        self._state = list(state)
        self._strides = [tensor.stride() for tensor in examples]

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """One step; the loss and what else the program returns, tensors of their own.

        Args:
            inputs: Tensors of a batch of the compiled shapes; used as they are where their strides fit.
        """
        # A copy, since the program may empty the list that it is given.
        flat = self._state.copy()
        for tensor, strides in zip(inputs, self._strides, strict=True):
            if tensor.stride() == strides and not (tensor.requires_grad or is_noted(tensor)):
                flat.append(tensor)
            else:
                laid_out = torch.empty_strided(
                    tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
                )
                flat.append(laid_out.copy_(tensor.detach()))
        given = flat[len(self._state) :] if self._written else []
        results = self._call(flat)
        for place in self._written:
            if given[place] is not inputs[place]:
                inputs[place].detach().copy_(given[place])
        return results

    def close(self) -> None:
        """Nothing is held but memory."""


class ReplayedStep:
    """A compiled program with its state, captured as a CUDA graph: a step costs the host one launch.

    Args:
        call: The program.
        state: Its first inputs, on the GPU; written in place and never moved.
        examples: Batch tensors as it was compiled for; copied.
        written: Places of those that it writes.

    Raises:
        CaptureError: the program cannot be captured; nothing can run on the device afterwards.

    Cost: Three steps, undone.
    """

    def __init__(
        self,
        call: Call,
        state: Sequence[Tensor],
        examples: Sequence[Tensor],
        written: Sequence[int] = (),
    ) -> None:
        self._written = written
        misplaced = sorted({str(t.device) for t in (*state, *examples) if t.device.type != "cuda"})
        if misplaced:
            raise CaptureError(
                f"wanted all of the step's tensors on the GPU, got some on {', '.join(misplaced)}; move what "
                "the loss function brings along (class weights, masks) to the model's device"
            )
        self._inputs = [tensor.detach().clone() for tensor in examples]
        arguments = [*state, *self._inputs]
        stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        # Warm-up calls train; what they wrote is put back before anybody sees it.
        with preserved([*state]), on_stream(stream), torch.no_grad():
            for _ in range(WARMUP_CALLS):
                call(arguments.copy())
        torch.cuda.synchronize()
        with capturing(self._graph, "the step's program", stream=stream), torch.no_grad():
            self._results = call(arguments.copy())
        self._call = call
        # A graph has addresses only, so tensors and compiled code live as long as it does.
        self._arguments = arguments
        self._release = weakref.finalize(self, _release, self._graph)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """One step; the loss and what else the program returns, tensors of their own.

        Cost: Copies the batch on the device; does not wait.
        """
        copy_into(self._inputs, inputs)
        self._graph.replay()
        # The graph has copies, and a step as written leaves what it writes in the batch itself.
        for place in self._written:
            inputs[place].detach().copy_(self._inputs[place])
        return [*map(Tensor.clone, self._results)]

    def close(self) -> None:
        """Release the graph and its memory.

        Cost: Waits for the device.
        """
        self._release()
        gc.collect()


def bind(
    call: Call, state: Sequence[Tensor], examples: Sequence[Tensor], written: Sequence[int] = ()
) -> BoundStep | ReplayedStep:
    """The program with its state, replayed as a CUDA graph where the state is on a GPU.

    What it writes into batch tensors of the places `written` is written into those of the caller.
    """
    on_gpu = any(tensor.is_cuda for tensor in (*state, *examples))
    kind = ReplayedStep if on_gpu else BoundStep
    return kind(call, state, examples, written)


def _release(graph: torch.cuda.CUDAGraph) -> None:
    torch.cuda.synchronize()
    graph.reset()
