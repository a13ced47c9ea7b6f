"""Flat buckets: many gradients in one tensor, so that one collective moves them all.

A gradient is copied into its place in the bucket right after backward made it (on CPUs, while it is
still in the cache) and `parameter.grad` becomes that place, a view. The optimizer thus reads the mean
where the collective left it and nothing is copied back.

Behind the payload are *flags*, one a parameter, set to 1 when this worker has a gradient. They are no part
of it, since a codec would corrupt them; with every exchange comes their sum. A parameter whose flag is 0
afterwards was not used at all, and keeps `grad = None`, as in a plain step. A worker that used all of its
parameters need not look. Behind them a worker says whether backward has written buffers, and there is room
for *signals*, by which workers send each other what else they must know, without a collective.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ridgeline.capture.ready import Ready
from ridgeline.optimizer_forms import is_dense
from ridgeline.plan import aligned_elements
from ridgeline.synchronisation import update_shard_elements

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""(number of elements, dtype, device) to memory of zeros."""


def zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of this process alone."""
    return torch.zeros(num_elements, dtype=dtype, device=device)


class Bucket:
    """Some parameters of one dtype and device, and the flat tensor for their gradients.

    Attributes:
        index: Launch order.
        names: Parameter names.
        parameters: The parameters, in ready order.
        flat: One tensor, [payload, behind].
        payload: [elements of all views, padding], of which the workers make the mean; of as many equal parts
            as it was made for.
        behind: [one flag a parameter, `written`, signals], of which they make the sum, or a multiple of it.
        written: Whether backward has written buffers on any worker, as far as they say; see `SentBuffers`.
        signals: What the workers' signals amount to: their sum, scaled as gradients are when it is read.
        sent_signals: What this worker says in every coming step; written by each part that has something to
            send.
        views: The gradients' places in `flat`, each of its parameter's shape and strides.
        ready: When those gradients are ready that report it.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[tuple[str, nn.Parameter]],
        num_signals: int = 0,
        num_parts: int = 1,
        allocate: Allocate = zeros,
    ) -> None:
        self.index = index
        self.names = tuple(name for name, _ in members)
        self.parameters = tuple(parameter for _, parameter in members)
        first = self.parameters[0]
        offsets = []
        end = 0
        for parameter in self.parameters:
            offsets.append(end)
            end += aligned_elements(parameter.numel(), first.element_size())
        # Each worker updates an equal part, so the payload has to divide by their number.
        if num_parts > 1:
            end = num_parts * update_shard_elements(end, first.element_size(), num_parts)
        num_flags = len(self.parameters)
        self.flat = allocate(end + num_flags + 1 + num_signals, first.dtype, first.device)
        self.payload, self.behind = self.flat[:end], self.flat[end:]
        told = self.behind.split([num_flags, 1, num_signals])
        self.flags, self.written, self.signals = told
        # Copied to `behind` in the same launch as the gradients, which costs less than writing flags apart.
        self._said = torch.ones_like(self.behind)
        self._said[num_flags:].zero_()
        self.sent_signals = self._said[num_flags + 1 :]
        self.views = tuple(
            _view(self.flat, parameter, offset)
            for parameter, offset in zip(self.parameters, offsets, strict=True)
        )
        self.reset()

    @property
    def missing(self) -> tuple[int, ...]:
        """Positions of gradients that have not arrived."""
        return tuple(i for i, arrived in enumerate(self.arrived) if not arrived)

    def place(self, position: int, flat: Tensor) -> Tensor:
        """The place of a gradient in a tensor that is laid out like the payload: a view of it."""
        view = self.views[position]
        offset = view.storage_offset() - self.payload.storage_offset() + flat.storage_offset()
        return flat.as_strided(view.size(), view.stride(), offset)

    def reset(self) -> None:
        """Expect all gradients again."""
        self.arrived = [False] * len(self.parameters)
        self.num_missing = len(self.parameters)
        self.ready: list[Ready] = []

    def store(self, position: int, scale: float) -> None:
        """Copy one gradient into its place, scaled, and make it the parameter's gradient."""
        parameter, view = self.parameters[position], self.views[position]
        gradient = parameter.grad
        assert gradient is not None
        # Scaled on the way: a sum of scaled values cannot overflow where that of plain ones would.
        torch.mul(gradient.detach(), scale, out=view)
        self.show(position)

    def show(self, position: int) -> None:
        """Make the place of a gradient the parameter's gradient: an alias, whose `data` may be exchanged."""
        self.parameters[position].grad = self.views[position].detach()

    def store_all(self, missing: Sequence[int]) -> None:
        """Copy the gradients that arrived and are not in their places already, and say which did not.

        Cost: One launch on GPUs, and one more for each that is missing.
        """
        pairs = [
            (gradient, view)
            for parameter, view, arrived in zip(
                self.parameters, self.views, self.arrived, strict=True
            )
            if arrived and (gradient := parameter.grad) is not None and not is_at(gradient, view)
        ]
        gradients, views = zip(*pairs, (self._said, self.behind), strict=True)
        torch._foreach_copy_(list(views), list(gradients))
        for i in missing:
            self.flags[i].zero_()
        for i, arrived in enumerate(self.arrived):
            if arrived:
                self.show(i)

    def blank_missing(self) -> tuple[int, ...]:
        """Zero the places of gradients that did not arrive; their positions."""
        missing = self.missing
        for i in missing:
            self.views[i].zero_()
        return missing

    def raise_flags(self, missing: Sequence[int]) -> None:
        """Say which gradients this worker has, and its signals."""
        self.behind.copy_(self._said)
        for i in missing:
            self.flags[i].zero_()


def is_at(gradient: Tensor, view: Tensor) -> bool:
    """Whether a gradient lies in its place already."""
    return gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride()


def _view(flat: Tensor, parameter: nn.Parameter, offset: int) -> Tensor:
    # Fused optimizers want gradients laid out like their parameters (channels_last, say).
    if parameter.is_contiguous() or not is_dense(parameter):
        return flat[offset : offset + parameter.numel()].view(parameter.shape)
    return flat.as_strided(parameter.size(), parameter.stride(), offset)
