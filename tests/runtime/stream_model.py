"""A model of CUDA streams that knows what comes after what; nothing runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Work = tuple[str, int]


class Stream:
    """What was enqueued, each piece after some others; an event is the end of the last piece so far."""

    def __init__(self, model: "Streams", name: str) -> None:
        self.model, self.name = model, name
        self.device, self.device_index, self.cuda_stream = torch.device("cuda", 0), 0, hash(name)
        self.last: Work | None = None
        self.own: list[Work] = []

    def enqueue(self, what: str, *after: Work | None) -> None:
        work = what, len(self.model.after)
        self.model.after[work] = {one for one in (self.last, *after) if one is not None}
        self.last = work
        self.own.append(work)

    def record_event(self) -> "Event":
        return Event(self.model, self.last)

    def wait_event(self, event: "Event") -> None:
        self.enqueue("wait", event.end)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Event:
    """A point of a stream."""

    def __init__(self, model: "Streams", end: Work | None) -> None:
        self.model, self.end = model, end

    def wait(self) -> None:
        self.model.current.wait_event(self)


class Streams:
    """Some streams, one of them the current one."""

    def __init__(self) -> None:
        self.after: dict[Work, set[Work]] = {}
        self.made: list[Stream] = []
        self.current = self.main = self.make("main")

    def make(self, name: object = "other", **_: object) -> Stream:
        self.made.append(Stream(self, str(name)))
        return self.made[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def before(self, work: Work | None) -> set[Work]:
        """Everything that is over when a piece of work is."""
        found: set[Work] = set()
        pending = [work] if work is not None else []
        while pending:
            one = pending.pop()
            if one not in found:
                found.add(one)
                pending += self.after[one]
        return found

    def work(self, what: str) -> Work:
        (found,) = (work for work in self.after if work[0] == what)
        return found
