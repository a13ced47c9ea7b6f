"""The hierarchical mean over hosts of any shape, its messages handed over in memory between threads."""

import queue
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.runtime.sync.transports import hierarchical
from ridgeline.runtime.sync.transports.hierarchical import Hierarchical
from ridgeline.runtime.sync.transports.messages import Message

_PATIENCE_S = 20


class _Arrival:
    """What is to be received, as torch's works are waited for."""

    def __init__(self, brought: "queue.Queue[Tensor]", place: Tensor) -> None:
        self._brought, self._place = brought, place

    def wait(self) -> None:
        found = self._brought.get(timeout=_PATIENCE_S)
        assert found.numel() == self._place.numel(), "both ends name messages of one size"
        self._place.copy_(found)


class _InMemory:
    """Messages between threads; the group is (rank, the way from each worker to each)."""

    on_device = False

    def __init__(self, group: Any, *, on_device: bool) -> None:
        assert not on_device
        self._rank, self._ways = group

    def receive(self, receives: Sequence[Message]) -> list[_Arrival | None]:
        return [
            _Arrival(self._ways[peer, self._rank], tensor) if tensor.numel() else None
            for tensor, peer in receives
        ]

    def send(self, sends: Sequence[Message]) -> None:
        for tensor, peer in sends:
            if tensor.numel():
                self._ways[self._rank, peer].put(tensor.clone())

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[_Arrival | None]:
        arriving = self.receive(receives)
        self.send(sends)
        return arriving

    def finish(self) -> None:
        """What was sent is a copy."""


@pytest.mark.parametrize("pieces", [0, 5])
@pytest.mark.parametrize("num_elements", [1, 77, 4000, 50_001])
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 3), (3, 2), (2, 4)])
def test_all_get_the_mean(
    monkeypatch: pytest.MonkeyPatch, hosts: int, local: int, num_elements: int, pieces: int
) -> None:
    """Also where a host has more workers than there are hosts."""
    monkeypatch.setattr(hierarchical, "Messages", _InMemory)
    size = hosts * local
    ways: Any = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    torch.manual_seed(0)
    values = [torch.randn(num_elements) for _ in range(size)]
    wanted = torch.stack(values).double().mean(0).float()
    errors: list[BaseException] = []

    def reduce(rank: int) -> None:
        world: Any = SimpleNamespace(
            device=torch.device("cpu"),
            group=lambda _: (rank, ways),
            axis_size=lambda _: size,
            axis_rank=lambda _: rank,
        )
        try:
            Hierarchical(world, {"local": local, "pieces": pieces}).mean(values[rank])
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for value in values:
        torch.testing.assert_close(value, wanted)
        assert torch.equal(value, values[0])
