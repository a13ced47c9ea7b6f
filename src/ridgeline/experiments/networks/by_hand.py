"""One CUDA graph around a whole training step, as an expert writes it in plain PyTorch.

Source: the section "Whole-network capture" of torch's notes on CUDA semantics.
"""

from typing import Any

import torch
from torch import Tensor

from ridgeline.experiments.plain_step import PlainStep

WARMUP_STEPS = 3
"""On the side stream, before the capture: libraries allocate and tune, the optimizer makes its state."""


class WholeStepGraph:
    """Replays one captured step; inputs are copied into the tensors that it was captured with.

    Args:
        step: Zeroes gradients to None, so that the graph allocates them in its own memory.
        batch: The static inputs.
    """

    def __init__(self, step: PlainStep, batch: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                step(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        step.optimizer.zero_grad(set_to_none=True)
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        # Other threads (a pool of compilers, a recorder) may call the device meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = step(batch)
        self._held = (step, batch)  # the graph writes into its parameters and reads its tensors

    def __call__(self) -> Tensor:
        """One step; the loss, which the next one overwrites."""
        assert self._graph is not None
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

    Cost: Some steps, and memory for all activations as long as it is open.
    """
    return WholeStepGraph(step, batch)
