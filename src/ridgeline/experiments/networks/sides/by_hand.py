"""One CUDA graph around a whole training step, as an expert writes it in plain PyTorch.

Source: the section "Whole-network capture" of torch's notes on CUDA semantics.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.capture.capturing import clear_failed_capture
from ridgeline.capture.dropout_states import DropoutStates
from ridgeline.capture.unchecked import unchecked
from ridgeline.experiments.contests import warm_up_aside
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.tensors.nests import tensors_in


class WholeStepGraph:
    """Replays one captured step; inputs are copied into the tensors that it was captured with.

    Args:
        step: Zeroes gradients to None, so that the graph allocates them in its own memory.
        batch: An example, of which the static inputs are copies.
    """

    def __init__(self, step: PlainStep, batch: Any) -> None:
        # Tensors of its own: the graph reads these in each replay, whatever becomes of the example.
        batch = pytree.tree_map_only(Tensor, Tensor.clone, batch)
        warm_up_aside(lambda: step(batch))
        torch.cuda.synchronize()
        # Gradients of the warm-up are not in the graph's memory.
        step.optimizer.zero_grad(set_to_none=True)
        self._states = DropoutStates(step.model.modules())
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        # A pool of its own, which is given back with a capture that failed.
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        try:
            # Other threads (a pool of compilers, a recorder) may call the device meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._loss = step(batch)
        except BaseException:  # a script would end here; other forms continue in this process
            torch.cuda.set_stream(stream)
            clear_failed_capture(self._graph, pool, stream.device)
            raise
        self._held = step  # the graph writes into its parameters
        self._inputs = tensors_in(batch)  # the graph reads them

    def __call__(self, batch: Any) -> Tensor:
        """One step on a batch; the loss, which the next one overwrites."""
        assert self._graph is not None
        for static, tensor in zip(self._inputs, tensors_in(batch), strict=True):
            static.copy_(tensor)
        self._graph.replay()
        return self._loss

    def close(self) -> None:
        """Give the graph's memory back."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


def whole_step_graph(step: PlainStep, batch: Any) -> WholeStepGraph:
    """The step captured for one batch.

    Raises:
        RuntimeError: the capture failed, most often because the step waits for the device.

    Checks of distributions are off meanwhile, as `set_default_validate_args(False)` has them.

    Cost: Some steps, and memory for all activations as long as it is open.
    """
    with unchecked():
        return WholeStepGraph(step, batch)
