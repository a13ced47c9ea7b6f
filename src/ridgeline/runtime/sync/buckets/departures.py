"""When gradients are sent, and from which stream: on GPUs from their own, as soon as they are ready.

A compiled program hands out all gradients at once but says when each was ready (see `ready`); a bucket
full of those leaves at that point. Inside a capture others leave from that stream too, so that copying them
into their bucket does not hold up what is left of backward, and the program is notified of places in the
buckets, so that what it converts anyway need not be copied once more.
"""

import contextlib
import operator
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ridgeline.capture import ready
from ridgeline.errors import CaptureError
from ridgeline.runtime.sync.buckets.buckets import Bucket, is_at


class Departures:
    """The way of one worker's gradients out of backward.

    Args:
        device: On a CPU everything leaves from where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_device else None
        self._sent: list[Tensor] = []
        self._told: dict[int, tuple[int, int]] = {}
        self._telling: dict[int, tuple[int, int]] = {}
        self._is_captured = False
        self._buckets: frozenset[int] = frozenset()

    def begin(self, views: Mapping[int, Tensor]) -> None:
        """A backward pass begins.

        Args:
            views: Places of the gradients in their buckets, by parameter.
        """
        self._is_captured = self._on_device and torch.cuda.is_current_stream_capturing()
        self._telling = {}
        if not self._is_captured:
            ready.watch()
            return
        # Results of one program come in one order. Places get version counters of their own: views of one
        # bucket share theirs.
        ready.watch({result: views[index].data for index, result in self._told.items()})
        self._buckets = frozenset(map(_memory, views.values()))

    def arrive(self, index: int, gradient: Tensor, view: Tensor) -> ready.Ready | None:
        """The gradient of a parameter is complete; when it was ready, if that is known.

        Raises:
            CaptureError: it was written to the place of another parameter.
        """
        if not self._on_device:
            return None
        told = ready.look_up(gradient)
        is_moved = _memory(gradient) in self._buckets and not is_at(gradient, view)
        # The program wrote it to the place of another parameter by last step's order.
        if self._is_captured and is_moved:
            raise CaptureError(
                "wanted the captured step to compute its gradients in the order of the steps before, got "
                "another one: the order in which blocks of the model run changes; use execution='graph'"
            )
        if told is not None and gradient.stride() == view.stride():
            self._telling[index] = (told.number, told.program)
        return told

    @contextlib.contextmanager
    def from_where_ready(self, bucket: Bucket, *, is_last: bool) -> Iterator[None]:
        """On a stream on which all gradients of the bucket are ready.

        Args:
            bucket: Full.
            is_last: Nothing is left of backward that copying could hold up.
        """
        tells = len(bucket.ready) == len(bucket.parameters)
        if self._stream is None or not (tells or (self._is_captured and not is_last)):
            yield
            return
        # Their memory must not go to anybody before it is read on that stream: `join` waits for it.
        self._sent += [p.grad for p in bucket.parameters if p.grad is not None]
        if tells:
            for told in bucket.ready:
                self._stream.wait_event(told.event)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def end(self) -> None:
        """The backward pass is over."""
        self._told = self._telling or self._told  # a step run operator by operator says nothing
        ready.unwatch()

    def join(self) -> None:
        """What follows on the current stream comes after all that left."""
        if self._stream is not None and self._sent:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._sent.clear()


def by_readiness(arrivals: list[tuple[ready.Ready | None, int]]) -> list[int]:
    """Parameters that say when they are ready, in the order of that, then the others as they arrived."""
    telling = [(told.number, index) for told, index in arrivals if told is not None]
    rest = [index for told, index in arrivals if told is None]
    return [index for _, index in sorted(telling, key=operator.itemgetter(0))] + rest


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
