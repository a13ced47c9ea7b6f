"""As much of torch.cuda as stream lanes use: it runs nothing and notes who waits for whom."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class FakeEvent:
    """Notes who waits for it."""

    def __init__(self, cuda: "FakeCuda", stream: "FakeStream", number: int) -> None:
        self.cuda, self.stream, self.number = cuda, stream, number
        self.is_captured = stream.name in cuda.capturing

    def wait(self) -> None:
        self.cuda.current.wait_event(self)

    def synchronize(self) -> None:
        self.cuda.log.append(("host", "waits for", self.stream.name))


class FakeStream:
    """Notes what is enqueued."""

    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda, self.name = cuda, name
        self.device, self.device_index, self.cuda_stream = torch.device("cuda", 0), 0, hash(name)
        self.num_events = 0

    def record_event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self.cuda, self, self.num_events)

    def wait_event(self, event: FakeEvent) -> None:
        capturing = self.cuda.capturing
        if event.is_captured:
            assert event.stream.name in capturing, "an event of a finished capture"
            capturing.add(self.name)
        else:
            assert self.name not in capturing, "an event from outside the capture"
        self.cuda.log.append((self.name, "waits for", event.stream.name))


class FakeCuda:
    """As much of torch.cuda as a stream lane uses."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.capturing: set[str] = set()
        self.current = self.main = FakeStream(self, "main")

    def ran(self, what: str) -> None:
        self.log.append((self.current.name, "runs", what))

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing.add("main")
        yield
        self.capturing.clear()
