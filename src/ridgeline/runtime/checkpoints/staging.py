"""Host memory for the state of a run: filled at a step boundary, written to disk while training continues.

The memory is kept from one save to the next, so that only the first one waits for pages. For the state of a
GPU it is pinned, and all copies are on their way before they are waited for. (That of the stager of
torch.distributed.checkpoint is given up behind each copy in release 2.11, which cannot make a second one.)
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class Staging:
    """Copies of tensors on the host, in memory that the next copies take again."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies that stay as they are until the next call.

        Returns:
            Contiguous CPU tensors that share no memory.

        Cost: One copy; waits for the device. What lasts is as much host memory as the tensors have; pinned
            memory comes in powers of two.
        """
        self._held = {name: self._place(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._held[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._held)

    def close(self) -> None:
        """Release the memory, once nothing is written from it any more."""
        self._held = {}

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """Memory for a copy: that of the last one, if it fits."""
        held = self._held.get(name)
        if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            return held
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
        )
