"""Host memory for the state of a run: copied into at a step boundary, written from while training goes on.

The copies are those of torch.distributed.checkpoint's stager. Its memory is kept from one save to the next,
so that only the first one waits for pages. For the state of a GPU it is pinned, and all copies are on their
way before they are waited for.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class Staging:
    """Copies of tensors on the host, in memory that the next copies take again.

    Args:
        device: Where most of the state is: the worker's.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        is_gpu = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=is_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_gpu,
        )
        self._stager = DefaultStager(options)

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies that stay as they are until the next call with tensors of the same memory.

        Args:
            tensors: By name, on the worker's device or the CPU; strided.

        Returns:
            CPU tensors, laid out like theirs: what shared memory shares it again.

        Cost: One copy; waits for the device. Their memory stays allocated as long as that of the tensors.
        """
        here = {
            name: tensor for name, tensor in tensors.items() if tensor.device.type == self._kind
        }
        staged: dict[str, Tensor] = self._stager.stage(here)  # type: ignore[assignment]
        # Beside a GPU's state: counts of steps, and what was gathered for this save, not worth pinning.
        return {
            name: staged[name] if name in staged else tensor.to("cpu", copy=True)
            for name, tensor in tensors.items()
        }

    def close(self) -> None:
        """Give the memory back, once nobody writes from it."""
        self._stager.close()
