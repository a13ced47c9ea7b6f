"""Buffers (batch norm statistics and the like) follow worker 0, as DistributedDataParallel does it.

DDP broadcasts them before every forward. Forward is what changes them, so broadcasting right after it
gives the next forward the same values, hides the transfer behind backward, and leaves all workers equal
whenever a step returns. Where backward writes them too (recomputed activations), their version counters
tell, and they are sent again.

All buffers of a device lie in one tensor of bytes: one broadcast, nothing copied.
"""

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

ALIGNMENT_BYTES = 64
"""Start of every view: one cache line."""


class FlatBuffers:
    """The buffers of a model, moved into one flat tensor of bytes per device.

    Attributes:
        flats: The flat tensors, [bytes of all buffers and padding]; empty when the model has no buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        tensors: dict[int, Tensor] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001 - to replace the tensor itself
                if buffer is not None and not buffer.is_sparse:
                    places.setdefault(id(buffer), []).append((module, name))
                    tensors[id(buffer)] = buffer
        groups: dict[torch.device, list[int]] = {}
        for key, buffer in tensors.items():
            groups.setdefault(buffer.device, []).append(key)
        self._views: list[Tensor] = []
        self.flats = tuple(
            self._flatten([(tensors[key], places[key]) for key in keys]) for keys in groups.values()
        )

    @property
    def versions(self) -> tuple[int, ...]:
        """Counters that every write into a buffer raises."""
        return tuple(view._version for view in self._views)  # noqa: SLF001 - torch has no public name

    def _flatten(self, members: list[tuple[Tensor, list[tuple[nn.Module, str]]]]) -> Tensor:
        sizes = [buffer.numel() * buffer.element_size() for buffer, _ in members]
        rooms = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        flat = torch.zeros(sum(rooms), dtype=torch.uint8, device=members[0][0].device)
        offset = 0
        for (buffer, places), size, room in zip(members, sizes, rooms, strict=True):
            # As memory of its own: a write into another buffer, or the broadcast, must not look to autograd
            # like a change of this one, nor to a compiler like a change of what it reads as another type.
            part = from_dlpack(flat[offset : offset + size])
            view = part.view(buffer.dtype).view(buffer.shape)
            view.copy_(buffer)
            offset += room
            self._views.append(view)
            for module, name in places:
                module._buffers[name] = view  # noqa: SLF001
        return flat
