"""Losses read without stalling: collected on the device, averaged over the workers window by window.

The losses of a window of steps are kept, on CUDA in a small tensor on the device. At its end one all-reduce
makes the mean over the workers, and both go to the host. On CUDA the copy is asynchronous and is looked
at one window later, so that the host never waits for the device; on the CPU it is there at once. Because
every worker sees the same means, all of them take the same decision at the same step.

Windows follow a rhythm in time: short steps are read by the hundred, since a reading costs as much as a few
operators, and people read no faster. How long the next window is, worker 0's clock says to all.
"""

import math
import time

import torch
from torch import Tensor

from ridgeline.codec import Value
from ridgeline.workers.agree import sum_over_workers
from ridgeline.workers.world import World

WINDOW_STEPS = 10
"""Least steps between two readings: an all-reduce of a dozen numbers costs as much as a short operator."""
MOST_STEPS = 1000
"""Most of them: a bad loss ends the run within this many steps."""
WINDOW_S = 0.1
"""Wanted seconds between two readings: as often as somebody who watches can take in."""


class Window(Value, frozen=True, kw_only=True):
    """Losses of consecutive steps from `first_step` on (counted from 1 over the whole run).

    `means` are over the workers along the data axis, and equal on all of them; `mine` are this worker's.
    `num_stops` is the number of workers that asked to stop.
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
    """Collects losses and returns them window by window.

    Args:
        world: This worker's place.
        window_steps: Steps of the first window, and the least of those that follow.
        window_s: Seconds that windows of more steps should last.
    """

    def __init__(
        self, world: World, *, window_steps: int = WINDOW_STEPS, window_s: float = WINDOW_S
    ) -> None:
        self._world = world
        self._on_device = world.device.type == "cuda"
        self._least, self._window_s = window_steps, window_s
        self._size = window_steps
        self._losses: list[float] = []
        self._on_gpu: Tensor | None = None
        if self._on_device:
            most = max(window_steps, MOST_STEPS)
            self._on_gpu = torch.zeros(most, dtype=torch.float64, device=world.device)
        self._count = 0
        self._begun_s = 0.0
        self._first_step = 1
        self._staged: tuple[Tensor, int, int, torch.cuda.Event | None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether a window is complete."""
        return self._count >= self._size

    def start(self, step: int) -> None:
        """The next loss is that of `step`."""
        self._first_step = step

    def add(self, loss: Tensor) -> None:
        """Keep the loss of a step; its value is taken now, as a captured step reuses its tensor."""
        if not self._count:
            self._begun_s = time.perf_counter()
        if self._on_gpu is None:
            self._losses.append(loss.item())
        else:
            self._on_gpu[self._count].copy_(loss)
        self._count += 1

    def take(self, *, wants_stop: bool) -> list[Window]:
        """Close the current window; the windows that can be looked at without waiting.

        Cost: One all-reduce. On CUDA it is enqueued, and the window before this one is returned.
        """
        ready = self._land()
        if self._count:
            self._stage(wants_stop)
            if not self._on_device:
                ready += self._land()
        return ready

    def drain(self, *, wants_stop: bool) -> list[Window]:
        """Close the current window and return all that were not looked at yet.

        Cost: One all-reduce; waits for the device.
        """
        return self.take(wants_stop=wants_stop) + self._land()

    def _stage(self, wants_stop: bool) -> None:
        """Enqueue the sums of the window, of who wants to stop, and of worker 0's seconds a step."""
        count = self._count
        # Only worker 0 adds to its own, so that the sum is the same on all workers to the last bit.
        step_s = 0.0
        if self._world.rank == 0 and count > 1:
            step_s = (time.perf_counter() - self._begun_s) / (count - 1)
        ends = [float(wants_stop), step_s]
        if self._on_gpu is None:
            # Twice: the first row becomes the sum over the workers, the second stays this worker's.
            both = torch.tensor(
                [self._losses + ends, self._losses + ends], dtype=torch.float64, device="cpu"
            )
            self._losses = []
        else:
            both = torch.zeros(2, count + 2, dtype=torch.float64, device=self._world.device)
            both[:, :count] = self._on_gpu[:count]
            for place, value in enumerate(ends, count):
                both[0, place] = value  # a fill: a copy from the host would wait for the device
        sum_over_workers(both[0], self._world, "data")
        event = None
        if self._on_device:
            host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True, device="cpu")
            host.copy_(both, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            both = host
        self._staged = (both, self._first_step, count, event)
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
        step_s = sums[count + 1]
        if step_s > 0.0:
            # From the sum, and so the same everywhere: workers must come to each reading together.
            wanted = min(int(self._window_s / step_s), MOST_STEPS)
            self._size = max(self._least, wanted)
        return [
            Window(
                first_step=first_step,
                means=tuple(total / self._world.axis_size("data") for total in sums[:count]),
                mine=tuple(mine[:count]),
                num_stops=round(sums[count]),
            )
        ]
