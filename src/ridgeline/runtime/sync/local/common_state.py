"""What workers that train alone must hold alike: all state at first, then common parameters and settings.

Their own parameters and what their optimizers remember differ, as they should. What one of them alone writes
into its parameters is progress of its own, of which the others get their share at the next exchange. But
common parameters that differ once differ for ever, and nothing fails. Neither does it where one worker alone
trains with another learning rate. So both are compared after exchanges: the 1st, 2nd, 4th, 8th and so on, at
last each 64th.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.runtime.layout.same_state import (
    check_same_entries,
    check_same_state,
    setting_entries,
)
from ridgeline.runtime.sync.local.local_steps import LocalSteps
from ridgeline.workers.world import World

MOST_APART = 64
"""Most exchanges between two comparisons."""


class CommonState:
    """Watches what the workers have in common, one worker's part of it.

    Args:
        model: Its parameters and buffers are compared before the first step.
        optimizer: Its state is compared then, and its settings.
        synchronizer: Has the common parameters, and counts steps and exchanges.
        world: This worker's place; size at least 2.

    Cost: A comparison reads the common parameters twice and waits for the device; other steps cost nothing.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, synchronizer: LocalSteps, world: World
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._synchronizer, self._world = synchronizer, world
        self._is_first = True
        self._num_seen = 0

    def before_step(self) -> None:
        """A step begins.

        Raises:
            WorkloadError: it is the first one, and the workers hold different state.
        """
        if not self._is_first:
            return
        self._is_first = False
        # The count first: by it a worker decides whether it comes to the second comparison.
        self._compare("at its first step")
        if not self._synchronizer.num_steps:  # no worker has trained alone yet
            check_same_state(self._model, self._optimizer, self._world, when="at its first step")

    def after_step(self) -> None:
        """The step is over; compare if an exchange was due for it.

        Raises:
            WorkloadError: the workers have other common parameters, or train with other settings.
        """
        count = self._synchronizer.num_exchanges
        if count != self._num_seen:
            self._num_seen = count
            if not count & (count - 1) or count % MOST_APART == 0:
                self._compare(f"after exchange {count}")

    def _compare(self, when: str) -> None:
        synchronizer = self._synchronizer
        steps = ("setting number of local steps", synchronizer.num_steps)
        found: list[tuple[str, Any | Tensor]] = [steps, *setting_entries(self._optimizer)]
        if synchronizer.num_steps:
            found += [(f"common parameter {n}", place) for n, place in synchronizer.common()]
        check_same_entries(found, self._world, when=when)
