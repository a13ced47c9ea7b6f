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


class StateExchange(NamedTuple):
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
    def fits(self) -> bool:
        """Whether the values of the new one can stand in the place."""
        place, now = self.place, self.now
        return (
            type(now) is Tensor
            and not now.is_inference()
            and (place.shape, place.dtype) == (now.shape, now.dtype)
            and place.layout is now.layout is torch.strided
            and place.stride() == now.stride()
            and not overlaps(place)
        )

    @property
    def is_possible(self) -> bool:
        """Whether it fits, and neither memory is seen by other tensors."""
        owners = [num_owners(one.untyped_storage()) for one in (self.now, self.before)]
        return owners == [1, 2]  # the second that of `place`, too

    def carry_out(self, *, is_check: bool) -> Tensor:
        """What stands there from now on.

        In a check, which puts back what it has found, that is the tensor before, with the new values. Else
        the two exchange memory and values, and it is the new one, or `place` where the new one lies on
        another device (loaded step counts lie on the host).
        """
        place, before, now = self
        with torch.no_grad():
            if is_check:
                place.copy_(now)
                return before
            kept, other = place.clone(), now.detach()
            place.copy_(other)
            if now.device != place.device:
                before.data = kept
                return place
            other.copy_(kept)
            now.data, before.data = place, other
        return now


def are_possible(exchanges: Iterable[StateExchange], *, is_check: bool) -> bool:
    """Whether all of them are, each with a tensor of its own.

    All are asked before the first is carried out: a refusal leaves everything as it was.

    Args:
        exchanges: What was replaced.
        is_check: Of a check, whose values alone are taken: whoever else sees the memory does not count.
    """
    asked = [*exchanges]
    is_apart = len({id(one.now) for one in asked}) == len(asked)
    return is_apart and all(one.fits and (is_check or one.is_possible) for one in asked)
