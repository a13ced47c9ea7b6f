"""Where arguments come from: addresses that come again get graphs that read them there, without a copy.

A graph reads fixed addresses. Any tensor of the captured layout that lives at such an address is the right
input, whoever allocated it: torch's allocator hands out the same few addresses in a loop, and a feed with
fixed addresses those of its ring.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.runtime.hybrid.calls.capture import CallCapture
from ridgeline.runtime.hybrid.calls.forms import capturing

MOST_PLACES = 4
"""Places that get graphs: those of a ring of usual depth."""
RECURRENCES = 256
"""Times that a place is seen before it gets graphs: two captures take the time of some hundred copies."""
MOST_SEEN = 1024
"""Places that are remembered. After so many, arguments come from everywhere, and looking on is given up."""

_NONE: tuple[CallCapture, ...] = ()


class Places:
    """Graphs by the addresses of their arguments.

    Args:
        args: Example arguments, all of them tensors; their addresses are the first place, and the caller
            keeps them alive.
        capture: Makes graphs that read given arguments.

    Attributes:
        is_learning: Whether places that come again still get graphs.
        find: The graphs that read given arguments where they are; none if the place is not known (yet).

    Raises:
        CaptureError: a capture failed.

    Cost: Two captures for each of at most `MOST_PLACES` places; a call to `find` less than a microsecond.
    """

    def __init__(
        self, args: tuple[Tensor, ...], capture: Callable[..., Sequence[CallCapture]]
    ) -> None:
        self._capture = capture
        self._strides = [arg.stride() for arg in args]
        self._graphs: dict[Any, Sequence[CallCapture]] = {}
        self._seen: dict[Any, int] = {}
        self.find: Callable[..., Sequence[CallCapture]] = (
            self._finder_of_one() if len(args) == 1 else self._find_several
        )
        self.is_learning = True
        self._learn(_address(args), args)

    @staticmethod
    def can_serve(args: tuple[Any, ...]) -> bool:
        """Whether arguments can be known by their addresses: plain tensors on a GPU."""
        return bool(args) and all(
            type(arg) is Tensor and arg.is_cuda and not arg.is_conj() for arg in args
        )

    def _finder_of_one(self) -> Callable[[Tensor], Sequence[CallCapture]]:
        """`find` for one argument; a closure, since its time is part of each call's."""
        graphs, (stride,) = self._graphs, self._strides

        def find(x: Tensor) -> Sequence[CallCapture]:
            found = graphs.get(x.data_ptr())
            if found is None:
                return self._miss(x) if self.is_learning else _NONE
            # The same address may also be read in another layout, or with the other sign.
            return found if x.stride() == stride and not (x.is_neg() or x.is_conj()) else _NONE

        return find

    def _find_several(self, *args: Tensor) -> Sequence[CallCapture]:
        found = self._graphs.get(_address(args))
        if found is None:
            return self._miss(*args) if self.is_learning else _NONE
        return found if self._is_as_captured(args) else _NONE

    def _miss(self, *args: Tensor) -> Sequence[CallCapture]:
        """Note that a place without graphs was seen; its graphs, if it has now come often enough."""
        if not self._is_as_captured(args):
            return _NONE
        address = _address(args)
        times = self._seen[address] = self._seen.get(address, 0) + 1
        if len(self._seen) >= MOST_SEEN:
            self.is_learning = False
        if times < RECURRENCES or torch.cuda.is_current_stream_capturing():
            return _NONE
        return self._learn(address, args)

    def _is_as_captured(self, args: tuple[Tensor, ...]) -> bool:
        return [x.stride() for x in args] == self._strides and not any(
            x.is_neg() or x.is_conj() for x in args
        )

    def _learn(self, address: Any, args: tuple[Tensor, ...]) -> Sequence[CallCapture]:
        with capturing():
            self._graphs[address] = graphs = self._capture(*args)
        self.is_learning = len(self._graphs) < MOST_PLACES
        return graphs


def _address(args: tuple[Tensor, ...]) -> Any:
    return args[0].data_ptr() if len(args) == 1 else tuple([x.data_ptr() for x in args])
