"""Feeding a step: batches are loaded, pinned and copied to the device while it computes.

A loader lane (a thread) stays up to `depth` batches ahead. For a GPU it copies every batch to pinned
memory and enqueues the transfer on a stream of its own; the step's stream waits for it on the device.
Pinned and device memory come from torch's caching allocators, which give memory out again only after
the streams that used it are done, so no batch is ever overwritten while somebody reads it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import PlanError
from ridgeline.runtime.engine import Engine, Variable


def feed(
    loader: Iterable[Any], device: torch.device | str | None = None, depth: int = 2
) -> Iterator[Any]:
    """The batches of `loader` on `device`, in order, prepared ahead.

    Args:
        loader: Any iterable of nests of tensors, such as a DataLoader. Iterated in one other thread.
        device: Where the batches go; None takes the current GPU, or the CPU where there is none.
        depth: Batches prepared ahead; 0 does everything in the caller's thread.

    Yields:
        Batches. Each stays valid as long as it is referenced.

    Raises:
        PlanError: `depth` is negative.
        Exception: whatever the loader raises, unchanged, at the batch where it happened.

    Cost: `depth + 1` batches of memory. Waits on the host only when no batch is ready.
    """
    if depth < 0:
        raise PlanError(f"wanted depth >= 0, got {depth} in feed(...); 2 serves most loaders")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    mover = _Mover(place) if place.type == "cuda" else None
    if depth == 0:
        return _directly(loader, mover)
    return _ahead(loader, mover, depth)


class _Mover:
    """Copies batches to one GPU on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Enqueue the copies; the batch on the device and the event of its arrival."""
        pinned = pytree.tree_map(_pin, batch)
        with torch.cuda.stream(self._stream):
            moved = pytree.tree_map(self._move, pinned)
            arrived = torch.cuda.Event()
            arrived.record()
            return moved, arrived

    def receive(self, sent: tuple[Any, torch.cuda.Event]) -> Any:
        """Make the current stream wait for the arrival, and own the tensors."""
        batch, event = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, Tensor):
                leaf.record_stream(stream)
        return batch

    def _move(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


def _pin(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and not leaf.is_pinned():
        return leaf.pin_memory()
    return leaf


class _Slot:
    """One batch in flight: its variable, and what came of loading it."""

    def __init__(self, variable: Variable) -> None:
        self.variable = variable
        self.content: Any = None
        self.error: BaseException | None = None


def _directly(loader: Iterable[Any], mover: _Mover | None) -> Iterator[Any]:
    for batch in loader:
        yield mover.receive(mover.send(batch)) if mover else batch


def _ahead(loader: Iterable[Any], mover: _Mover | None, depth: int) -> Iterator[Any]:
    with Engine() as engine:
        iterator = iter(loader)
        position = engine.variable("position in the loader")
        slots = [_Slot(engine.variable(f"slot {index}")) for index in range(depth)]

        def load(slot: _Slot) -> None:
            # The loader's own exception belongs to the caller, at this batch and not before.
            try:
                batch = next(iterator)
                slot.content = mover.send(batch) if mover else batch
            except BaseException as error:  # noqa: BLE001 - StopIteration too: it ends the feed
                slot.error = error

        def ask(slot: _Slot) -> None:
            engine.push(
                lambda: load(slot), writes=(position, slot.variable), lane="loader", name="load"
            )

        for slot in slots:
            ask(slot)
        while True:
            for slot in slots:
                engine.wait(slot.variable)
                if isinstance(slot.error, StopIteration):
                    return
                if slot.error is not None:
                    raise slot.error
                content, slot.content = slot.content, None
                ask(slot)
                yield mover.receive(content) if mover else content
