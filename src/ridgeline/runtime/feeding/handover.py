"""Whether a loading thread is worth its handing over: batches that load faster than that load in place.

A batch that another thread prepares has to be asked for, waited for and handed over, and Python threads take
turns meanwhile. On two cores that costs a small step more than slicing its batch out of memory does, so a
feed of this kind begins in the caller's thread and takes a loading thread once loading has shown to be slower.
"""

import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable

import torch

FIRST_LOOKS = 3
"""Loads that are timed before a thread is thought of: the first ones open files and take fresh memory."""
LOOKS = 9
"""Loads whose median is compared: single slow ones (a page from disk, another program) start no thread."""
TURNS, STEPS, OPERATORS, VALUES = 5, 40, 20, 2000
"""What handing over is measured by: steps of about 0.1 ms, 200 with and 200 without it, in turns."""
AHEAD = 2
FAR = 20.0
"""A load that takes this many times as long as handing over leaves no doubt: no further one is awaited."""


class Handover:
    """What loading costs, against what handing a batch from thread to thread costs; shared by a run's feeds.

    Serves loaders that any thread may iterate, as those of a map-style data set.

    Args:
        handing_s: Seconds to hand one batch over; None measures it when it is first needed.
    """

    def __init__(self, handing_s: float | None = None) -> None:
        self._handing_s = handing_s
        self._loads: deque[float] = deque(maxlen=LOOKS)
        self._num_loads = 0
        self._pays = False

    @property
    def pays(self) -> bool:
        """Whether a loading thread is worth it. Once it was, it stays so: threads do not come and go."""
        return self._pays

    def note(self, load_s: float) -> None:
        """A batch was loaded in place, in so many seconds."""
        if self._handing_s is None:
            self._handing_s = handing_seconds()
        self._loads.append(load_s)
        self._num_loads += 1
        is_far = self._num_loads > 1 and min(self._loads) > FAR * self._handing_s
        if is_far or self._num_loads >= FIRST_LOOKS:
            self._pays = self._pays or statistics.median_low(self._loads) > self._handing_s


@functools.cache
def handing_seconds() -> float:
    """Seconds by which a step becomes longer when a loading thread hands it a batch; measured once a process.

    The batches are empty and the steps are a few operators long, in turns with the same steps without a feed:
    between operators the threads take turns in Python, which an idle consumer would not notice.

    Cost: About a tenth of a second.
    """
    from ridgeline.runtime.feeding.batches import Feed  # which asks this module in turn

    values = torch.ones(VALUES)
    alone: list[float] = []
    fed: list[float] = []
    for _ in range(TURNS):
        alone += _steps(itertools.repeat(None), values)
        with Feed(itertools.repeat(None), torch.device("cpu"), AHEAD, None) as batches:
            fed += _steps(batches, values)
    return max(0.0, statistics.median(fed) - statistics.median(alone))


def _steps(batches: Iterable[None], values: torch.Tensor) -> list[float]:
    """Seconds of small steps, each with the wait for its batch."""
    taken: list[float] = []
    begin = time.perf_counter()
    for _ in itertools.islice(batches, STEPS + 1):
        for _ in range(OPERATORS):
            values.mul_(1.0)
        end = time.perf_counter()
        taken.append(end - begin)
        begin = end
    return taken[1:]
