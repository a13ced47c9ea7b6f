"""One capture of a function: its graph, and its result handed out again and again.

A result is an alias of the graph's memory. Whoever holds it, or a view of it, keeps the graph from being
replayed: the storage counts its holders.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import CaptureError

_num_holders = torch._C._storage_Use_Count  # noqa: SLF001 - what torch's own graph trees use


class CallCapture:
    """One captured graph with its own memory, and the tensors of its result.

    Args:
        fn: The function, without gradients.
        inputs: The arguments that the graph reads, at their addresses.
        stream: Captured on it.

    Attributes:
        graph: The captured graph.
        launch: Replays it.
        tensors: What it writes as its result.

    Raises:
        CaptureError: the capture failed.

    Cost: Waits for the device, and gives cached memory back to it.
    """

    def __init__(
        self, fn: Callable[..., Any], inputs: tuple[Any, ...], stream: torch.cuda.Stream
    ) -> None:
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Threads that pin memory or watch NCCL go on calling CUDA meanwhile; that is allowed.
            with torch.cuda.graph(
                self.graph, stream=stream, capture_error_mode="thread_local"
            ), torch.no_grad():  # fmt: skip
                result = fn(*inputs)
        except RuntimeError as error:
            raise CaptureError(
                f"wanted to capture the function as a CUDA graph, got {type(error).__name__}: {error}; "
                "the process cannot go on after a failed capture, start it again with mode='eager'"
            ) from error
        self.launch = launch = self.graph.replay
        self._leaves, self._structure = pytree.tree_flatten(result)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._storages = list({t.untyped_storage()._cdata for t in self.tensors})  # noqa: SLF001
        self._holders = [_num_holders(storage) for storage in self._storages]
        self._is_single = self._structure.is_leaf() and len(self.tensors) == 1

        def replay() -> Any:
            """Replay, and the very tensors that the graph writes; a closure, since it is all of a call."""
            launch()
            return result

        self.replay = replay

    def is_free(self) -> bool:
        """Whether nobody holds a result of an earlier replay, or a view of one."""
        return [*map(_num_holders, self._storages)] == self._holders

    def aliases(self) -> Any:
        """The result as new tensors on the graph's memory."""
        return self.tensors[0].detach() if self._is_single else self._map(Tensor.detach)

    def copies(self) -> Any:
        """The result in memory of its own."""
        return self.tensors[0].clone() if self._is_single else self._map(Tensor.clone)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Any:
        return pytree.tree_unflatten(
            [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves],
            self._structure,
        )
