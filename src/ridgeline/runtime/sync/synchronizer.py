"""What the body of a step knows of other workers: calls around backward and optimizer, and state."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ridgeline.recording.recorder import Recorder

STATE_PHASE = "optimizer_state()"
"""What workers are in while they put together the state of an optimizer, to who waits for one of them."""


class Synchronizer(Protocol):
    """Makes what the workers train one: their gradients in each step, or their parameters now and then.

    A step calls `arm`, backward, `finish`, the optimizer, `after_step`. All workers make the same calls.

    Attributes:
        overhead_ns: Host time spent in here since `arm`, without copies and collective calls.
        trains_apart: Whether workers may hold different parameters and optimizer state between two steps.
    """

    overhead_ns: int
    trains_apart: bool

    def arm(self, recorder: Recorder) -> None:
        """The next backward is the last of a step; `recorder` is notified of the frames."""

    def finish(self) -> None:
        """Backward is over: see to it that the optimizer finds the gradients that it is to take."""

    def after_step(self) -> None:
        """The optimizer has updated the parameters."""

    def wait(self) -> None:
        """Update all parameters whose update is due; nothing where a step ends with all of them updated."""

    def clearing(self) -> AbstractContextManager[None]:
        """Inside, the step sets gradients to None for the next backward pass."""

    def forget_order(self) -> None:
        """The step has another form from now on, whose gradients may come in another order."""

    def order(self) -> tuple[str, ...]:
        """Parameters in the order of the buckets; empty where there is none, or none was measured yet."""

    def take_order(self, names: Sequence[str]) -> None:
        """Cut buckets in this order of another run, whose codecs would round otherwise; before any step."""

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See that all parameters of an optimizer (its `param_groups`) are synchronised.

        Raises:
            WorkloadError: one is not, so that every worker would train it on its own.
        """

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's `state_dict()`; all workers call this, and the first one gets all there is."""

    def state_dict(self) -> dict[str, Tensor]:
        """What this worker remembers from step to step, by name; the tensors themselves, not copies."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember this instead, written into the memory that is there."""

    def close(self) -> None:
        """Release hooks and memory."""


class UpdatesAtOnce:
    """What a synchronizer inherits whose steps end with all parameters updated, by each worker in full."""

    trains_apart = False

    def after_step(self) -> None:
        """See `Synchronizer`; nothing is left to do."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """See `Synchronizer`; this worker has all of it."""
        return optimizer.state_dict()

    def wait(self) -> None:
        """See `Synchronizer`; nothing is due."""

    def order(self) -> tuple[str, ...]:
        """See `Synchronizer`; none is measured."""
        return ()

    def take_order(self, names: Sequence[str]) -> None:
        """See `Synchronizer`; none is kept."""

    def clearing(self) -> AbstractContextManager[None]:
        """See `Synchronizer`; these gradients are no longer needed."""
        return nullcontext()
