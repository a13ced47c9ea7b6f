"""What a worker asks of a server, and what comes back."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ridgeline.runtime.kvstore.serving.wire import Answer, Body


class Asked(NamedTuple):
    """A call and the tensors that go with it.

    Attributes:
        take: Given the tensor of the answer as it comes, which is not kept then.
        room: Bytes of that tensor, where they are known.
    """

    body: Body
    frames: tuple[Tensor, ...] = ()
    take: Callable[[Tensor], None] | None = None
    room: int = 0

    @property
    def num_bytes(self) -> int:
        """Of the tensors that go and come."""
        return self.room + sum(frame.nbytes for frame in self.frames)

    @property
    def num_shared(self) -> int:
        """Bytes that may lie in shared memory: of its frame or the answer's, where there is just one."""
        sent = [frame.nbytes for frame in self.frames]
        return self.room if not sent else sent[0] if len(sent) == 1 and not self.room else 0


class Answered(NamedTuple):
    """An answer and the tensor that came with it."""

    answer: Answer
    tensor: Tensor | None
