"""Tensors that a script or an eager step put in the place of a program's state, moved to where it lies.

A program writes where it was bound to. A tensor that stands there instead now is given that memory with its
own values in it, and the one before gets the other memory with what it held. So whoever holds either sees
what a plain loop would show: state that was loaded is trained, and what it replaced stays as it was.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.optimizers.shared_memory import num_owners
from ridgeline.tensors.copies import overlaps


class Exchange(NamedTuple):
    """One tensor of the state that was replaced.

    Attributes:
        place: In the memory that the program is bound to.
        before: The tensor that lay there, as an object.
        now: The one that stands in its stead.
    """

    place: Tensor
    before: Tensor
    now: Tensor

    @property
    def is_needed(self) -> bool:
        """Whether another tensor stands there."""
        return self.now is not self.before

    @property
    def is_possible(self) -> bool:
        """Whether the new one fits, and neither memory is seen by other tensors."""
        place, now = self.place, self.now
        return (
            type(now) is Tensor
            and not now.is_inference()
            and (place.shape, place.dtype) == (now.shape, now.dtype)
            and place.layout is now.layout is torch.strided
            and place.stride() == now.stride()
            and not overlaps(place)
            and num_owners(now.untyped_storage()) == 1
            and num_owners(self.before.untyped_storage()) == 2  # and that of `place`
        )

    def carry_out(self) -> Tensor:
        """Exchange memory and values; what stands there from now on.

        That is the new one, or `place` where it lies on another device (loaded step counts lie on the host).
        """
        place, before, now = self
        with torch.no_grad():
            kept, other = place.clone(), now.detach()
            place.copy_(other)
            if now.device != place.device:
                before.data = kept
                return place
            other.copy_(kept)
            now.data, before.data = place, other
        return now


def are_possible(exchanges: Iterable[Exchange]) -> bool:
    """Whether all of them are, each with a tensor of its own.

    All are asked before the first is carried out: a refusal leaves everything as it was.
    """
    asked = [*exchanges]
    is_apart = len({id(one.now) for one in asked}) == len(asked)
    return is_apart and all(one.is_possible for one in asked)
