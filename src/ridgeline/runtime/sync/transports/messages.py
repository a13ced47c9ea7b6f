"""Messages between two workers of a group: over gloo sent by themselves, over NCCL enqueued together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ridgeline.workers.flat_collectives import start_messages


class Message(NamedTuple):
    """A flat tensor that goes to, or comes from, the worker at a position of the group."""

    tensor: Tensor
    peer: int


class Messages:
    """Sends and receives; both ends name the messages between them in the same order.

    Args:
        group: Of the workers.
        on_device: NCCL on a stream, or gloo.

    Attributes:
        on_device: Then what is received is started with what is sent, by `start` alone.
    """

    def __init__(self, group: dist.ProcessGroup, *, on_device: bool) -> None:
        self._group = group
        self.on_device = on_device
        self._sent: list[Any] = []

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Any]:
        """Start some messages; empty ones are left out, on both ends.

        Returns:
            One work for each that is received, None for empty ones; on a GPU the work of all.
        """
        if self.on_device:
            return self._enqueued(receives, sends)
        arriving = self.receive(receives)
        self.send(sends)
        return arriving

    def receive(self, receives: Sequence[Message]) -> list[Any]:
        """Over gloo, say where messages go; a work for each, None for empty ones."""
        return start_messages(receives, (), self._group)[0]

    def send(self, sends: Sequence[Message]) -> None:
        """Over gloo, start messages; see `finish`."""
        _, leaving = start_messages((), sends, self._group)
        self._sent += [work for work in leaving if work is not None]

    def exchange(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Start some messages, and wait for those that are received; on a GPU, the stream waits."""
        for work in self.start(receives, sends):
            if work is not None:
                work.wait()

    def ask(self, message: Message) -> None:
        """Send what the peer answers in the same place once it has it, and wait for the answer.

        Over gloo the place is named at once, as no answer can come before. Over NCCL these are two batches:
        two workers connect with the first batch that needs it, and it hangs unless the batches of both name
        the same directions (https://github.com/NVIDIA/nccl/issues/2130).
        """
        if self.on_device:
            self.exchange([], [message])
            self.exchange([message], [])
        else:
            self.exchange([message], [message])

    def finish(self) -> None:
        """Wait until what was sent may be overwritten; on a GPU the stream's order sees to that."""
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def _enqueued(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Any]:
        operations = [
            dist.P2POp(op, tensor, group=self._group, group_peer=peer)
            for op, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in messages
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []
