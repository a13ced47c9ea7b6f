"""Losses read without stalling: collected on the device, averaged over the workers window by window.

The loss of every step is copied into a small tensor on the device. When it is full, one all-reduce
makes the mean over the workers, and both go to the host. On CUDA the copy is asynchronous and is looked
at one window later, so that the host never waits for the device; on the CPU it is there at once. Because
every worker sees the same means, all of them take the same decision at the same step.
"""

import math

import torch
from torch import Tensor

from ridgeline.codec import Value
from ridgeline.runtime.agree import sum_over_workers
from ridgeline.runtime.world import World

WINDOW_STEPS = 10
"""Steps between two readings: an all-reduce of 11 numbers costs about as much as one short operator."""


class Window(Value, frozen=True, kw_only=True):
    """Losses of consecutive steps from `first_step` on (counted from 1 over the whole run).

    `means` are over the workers and equal on all of them; `mine` are this worker's. `num_stops` is the
    number of workers that asked to stop.
    """

    first_step: int
    means: tuple[float, ...]
    mine: tuple[float, ...]
    num_stops: int

    @property
    def first_bad(self) -> int | None:
        """Index of the first mean that is NaN or infinite."""
        return next((i for i, mean in enumerate(self.means) if not math.isfinite(mean)), None)


class LossReader:
    """Collects losses and gives them back by windows.

    Args:
        world: This worker's place.
        window_steps: Steps per window.
    """

    def __init__(self, world: World, *, window_steps: int = WINDOW_STEPS) -> None:
        self._world = world
        self._size = window_steps
        self._losses = torch.zeros(window_steps, dtype=torch.float64, device=world.device)
        self._count = 0
        self._first_step = 1
        self._staged: tuple[Tensor, int, int, torch.cuda.Event] | None = None

    @property
    def is_full(self) -> bool:
        """Whether a window is complete."""
        return self._count == self._size

    def start(self, step: int) -> None:
        """The next loss is that of `step`."""
        self._first_step = step

    def add(self, loss: Tensor) -> None:
        """Keep the loss of a step; it is copied, as a captured step reuses its tensor."""
        self._losses[self._count].copy_(loss)
        self._count += 1

    def take(self, *, wants_stop: bool) -> list[Window]:
        """Close the current window; the windows that can be looked at without waiting.

        Args:
            wants_stop: Whether this worker asks all to stop.

        Cost: One all-reduce. On CUDA it is enqueued, and the window before this one is returned.
        """
        ready = self._land()
        if self._count:
            self._stage(wants_stop)
            if self._world.device.type != "cuda":
                ready += self._land()
        return ready

    def drain(self, *, wants_stop: bool) -> list[Window]:
        """Close the current window and return all that were not looked at yet.

        Cost: One all-reduce; waits for the device.
        """
        return self.take(wants_stop=wants_stop) + self._land()

    def _stage(self, wants_stop: bool) -> None:
        count = self._count
        both = torch.zeros(2, count + 1, dtype=torch.float64, device=self._world.device)
        both[:, :count] = self._losses[:count]
        both[0, count] = float(wants_stop)
        sum_over_workers(both[0], self._world)
        if self._world.device.type == "cuda":
            host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            host.copy_(both, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._staged = (host, self._first_step, count, event)
        else:
            self._staged = (both, self._first_step, count, None)  # type: ignore[assignment]
        self._first_step += count
        self._count = 0

    def _land(self) -> list[Window]:
        if self._staged is None:
            return []
        host, first_step, count, event = self._staged
        self._staged = None
        if event is not None:
            event.synchronize()
        sums, mine = host.tolist()
        return [
            Window(
                first_step=first_step,
                means=tuple(total / self._world.size for total in sums[:count]),
                mine=tuple(mine[:count]),
                num_stops=round(sums[count]),
            )
        ]
