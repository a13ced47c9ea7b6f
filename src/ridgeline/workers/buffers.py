"""Buffers (batch norm statistics and the like) follow worker 0, as DistributedDataParallel does it.

DDP broadcasts them before every forward. Forward is what changes them, so what worker 0 has right after it
gives the next forward the same values. It travels behind backward, from a copy into a copy, since backward
still reads the buffers that this worker's forward left; they are filled when it is over. Where backward
writes them too (recomputed activations), their version counters show it, and they are sent when it is over.

The copy is one tensor of bytes for all buffers of a device: one broadcast.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.errors import WorkloadError

ALIGNMENT_BYTES = 64
"""Start of every view: one cache line."""


class _Place(NamedTuple):
    """Where a buffer is found: models may put another tensor there in any step."""

    path: str
    module: nn.Module
    name: str


class FlatBuffers:
    """Copies of the buffers of a model that can be sent; the buffers stay what and where they are.

    Attributes:
        flats: The copies, [bytes of all buffers and padding] per device; empty when there are no buffers.

    Raises:
        WorkloadError: a buffer is sparse, or several of its elements are one place in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        groups: dict[torch.device, list[tuple[_Place, Tensor]]] = {}
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001 - the only way to what is there now
                if buffer is not None and (buffer.is_sparse or buffer.numel()):
                    path = f"{prefix}.{name}" if prefix else name
                    _check(path, buffer)
                    place = _Place(path, module, name)
                    groups.setdefault(buffer.device, []).append((place, buffer))
        self._views: list[tuple[_Place, Tensor]] = []
        self.flats = tuple(self._flat(device, members) for device, members in groups.items())

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Numbers that every write into a buffer changes, and every exchange of one."""
        present = [place.module._buffers.get(place.name) for place, _ in self._views]  # noqa: SLF001
        return tuple((id(t), -1 if t is None else t._version) for t in present)  # noqa: SLF001

    def pack(self) -> None:
        """Copy the buffers to where they can be sent from.

        Raises:
            WorkloadError: one is gone, or of another shape or type than at first.
        """
        views = [view for _, view in self._views]
        _copy_all(views, self._present())

    def unpack(self) -> None:
        """Fill the buffers with what arrived; raises as `pack`."""
        _copy_all(self._present(), [view for _, view in self._views])

    def _present(self) -> list[Tensor]:
        found = []
        for place, view in self._views:
            tensor = place.module._buffers.get(place.name)  # noqa: SLF001
            if tensor is None or (tensor.shape, tensor.dtype) != (view.shape, view.dtype):
                got = "none" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise WorkloadError(
                    f"wanted the buffer {place.path} of shape {tuple(view.shape)} and {view.dtype} as at the "
                    f"first step, got {got}; keep its shape and type, or make the step again"
                )
            found.append(tensor)
        return found

    def _flat(self, device: torch.device, members: list[tuple[_Place, Tensor]]) -> Tensor:
        sizes = [buffer.numel() * buffer.element_size() for _, buffer in members]
        # Rounded up, since a view as another type has to begin at a multiple of its size.
        rooms = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        flat = torch.zeros(sum(rooms), dtype=torch.uint8, device=device)
        offset = 0
        for (place, buffer), size, room in zip(members, sizes, rooms, strict=True):
            view = flat[offset : offset + size].view(buffer.dtype).view(buffer.shape)
            self._views.append((place, view))
            offset += room
        return flat


def _check(path: str, buffer: Tensor) -> None:
    if buffer.is_sparse:
        raise WorkloadError(
            f"wanted dense buffers, which can be sent to other workers, got the sparse {path}; make it "
            "dense, or keep it as a plain attribute"
        )
    if any(
        size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    ):
        raise WorkloadError(
            f"wanted buffers of elements that each have their own memory, got an expanded one, {path}; "
            "register a clone() of it"
        )


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor, those of one type with one launch (on GPUs)."""
    by_type: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        ours, theirs = by_type.setdefault((target.dtype, target.device), ([], []))
        ours.append(target)
        theirs.append(source)
    with torch.no_grad():
        for ours, theirs in by_type.values():
            torch._foreach_copy_(ours, theirs)
