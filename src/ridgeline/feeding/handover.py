"""Whether a loading thread is worth its handing over: found out by a run itself, in turns.

A batch that another thread prepares has to be asked for, waited for and handed over, and Python threads take
turns meanwhile. Where slicing it out of memory takes no longer, a step is shorter without the thread; and
where every core is busy computing, a loading thread takes from the computing what it was to give.
"""

import statistics
from collections.abc import Callable

SKIPPED = 2
"""First steps of a turn: memory is fresh, a thread begins or ends."""
LOOKS = 8
TURNS = 4
"""Without and with a thread, twice: 40 steps in all, so that a machine that drifts does not decide."""
LITTLE = 0.01
"""Loading that takes this share of a step is done in place: more cannot be gained than that."""
MUCH_S = 1e-3
"""Loading that takes this long gets a thread at once: handing over costs a tenth of it."""
GAIN = 0.02
"""A thread must shorten the step by this fraction, which is what medians of so few steps leave open."""


class Handover:
    """Whether batches come from a loading thread; shared by the feeds of a run, which follow each other.

    Serves loaders that any thread may iterate, as those of a map-style data set.
    """

    def __init__(self) -> None:
        self.uses_thread = False
        self._is_decided = False
        self._turn = 0
        self._num_steps = 0
        self._loads_s: list[float] = []
        self._steps_s: dict[bool, list[float]] = {False: [], True: []}

    def note(self, step_s: float, load_s: float) -> None:
        """A step went by, from batch to batch.

        `load_s` are seconds of the step in which the caller loaded the batch, or waited for it.
        """
        if self._is_decided:
            return
        self._num_steps += 1
        if self._num_steps <= SKIPPED:
            return
        self._steps_s[self.uses_thread].append(step_s)
        if not self.uses_thread:
            self._loads_s.append(load_s)
        if self._num_steps == SKIPPED + LOOKS:
            self._end_turn()

    def _end_turn(self) -> None:
        self._turn, self._num_steps = self._turn + 1, 0
        # The low median is a step that really was, where two halves differ.
        median: Callable[[list[float]], float] = statistics.median_low
        plain_s, load_s = median(self._steps_s[False]), median(self._loads_s)
        if load_s <= LITTLE * plain_s:
            self._decide(False)
        elif load_s >= MUCH_S:
            self._decide(True)
        elif self._turn == TURNS:
            self._decide(median(self._steps_s[True]) < (1.0 - GAIN) * plain_s)
        else:
            self.uses_thread = not self.uses_thread

    def _decide(self, uses_thread: bool) -> None:
        self.uses_thread, self._is_decided = uses_thread, True
