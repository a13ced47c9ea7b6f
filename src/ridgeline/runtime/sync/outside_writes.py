"""State that a script writes between steps, on some workers only, found without a collective more.

At its first step the workers compare all of their state. From then on each watches what a script can do
between two steps: write into a parameter (the tensors' version counters show it), give it other memory or put
another in its place, load the optimizer, change a setting of it. That something was written, and eight bits
that depend on the settings, travel behind the gradients of the first bucket. Where a worker wrote, or the
bits differ, all compare again.

No counter reports a write through `parameter.data`. So in some steps the bits depend on all elements of
the parameters as well: the 2nd, 4th, 8th and so on, finally each 64th. Eight bits miss one difference in
256 then, and find it at the next such step.

On the CPU that is seen in the same step. On GPUs the bits of the parameters are computed there, each 64th
step, and what arrived is read every 64 steps, 64 steps later, without waiting. A script that writes in
every step, on all workers, is compared ever more rarely, finally every 64 steps.
"""

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.runtime.layout.same_state import check_same_state, content_bits
from ridgeline.runtime.sync.buckets.arrangement import NUM_SIGNALS
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.buckets.flags import real_of
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.workers.local_writes import LocalWrites
from ridgeline.workers.world import World

MOST_APART = 64
"""Most steps between two comparisons where a script writes all the time, and between two looks on a GPU."""
_NUM_BITS = NUM_SIGNALS - 2
_UNSAID = -1
"""Stands for a message that is not to stay."""


class OutsideWrites:
    """Watches the state of one worker between its steps.

    Args:
        model: Its parameters.
        optimizer: Its state, and its settings.
        reducer: Carries the signals.
        world: This worker's place; size at least 2.

    Cost: On the host about 3 us a step, 0.5 us a parameter, and 4 us where a scheduler changes settings.
        Every 64 steps two passes over the parameters, where they are.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, reducer: Reducer, world: World
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._reducer, self._world = reducer, world
        self._on_device = world.device.type == "cuda"
        self._known = {id(p): name for name, p in model.named_parameters()}
        self._writes = LocalWrites(model, optimizer)
        self._num_steps = 0
        self._next, self._apart = 0, 1
        self._has_written = False
        self._settings: list[Any] = []
        self._code = 0
        # Signals stay in the bucket, so that nothing is written while there is nothing new to say.
        self._said: tuple[Bucket, int] | None = None
        self._staged: tuple[Tensor, torch.cuda.Event] | None = None
        self._has_heard = False

    def before_step(self) -> None:
        """A step begins: say what was written since the last one.

        Raises:
            WorkloadError: it is the first one, and the workers hold different state.
        """
        if not self._num_steps:
            self._compare("at its first step", has_buffers=True)
        self._has_written = self._has_written or self._writes.found()
        if not self._on_device or self._num_steps % MOST_APART == 0:
            self._code_settings()
        self._say(self._code + (self._has_written << _NUM_BITS))
        if self._is_due(self._num_steps + 1):
            self._say_content()

    def after_step(self) -> None:
        """The step is over; see `hear`, unless that was called.

        Raises:
            WorkloadError: the workers hold different state.
        """
        if not self._has_heard:
            self.hear()
        self._has_heard = False
        self._writes.note()  # what this step left is no writing of the script's

    def hear(self) -> None:
        """Gradients were exchanged: hear what the others said, and compare if there is a reason.

        Code that updates parameters by what others hold calls this before; else `after_step` does.

        Raises:
            WorkloadError: the workers hold different state.
        """
        self._has_heard = True
        self._num_steps += 1
        heard = self._hear()
        if heard is not None and is_reason(heard) and self._num_steps >= self._next:
            self._compare(f"after step {self._num_steps}, before which it was written")
            self._has_written, self._staged = False, None
            self._next = self._num_steps + self._apart
            # A script that writes in every step, alike on all workers, costs ever less.
            self._apart = min(2 * self._apart, MOST_APART)

    def allow(self, num_writes: int) -> None:
        """So many writes into parameters are those of a step that updates some of them late."""
        self._writes.allow(num_writes)

    def _compare(self, when: str, *, has_buffers: bool = False) -> None:
        check_same_state(
            self._model,
            self._optimizer,
            self._world,
            when=when,
            has_buffers=has_buffers,
            known=self._known,
        )

    def _code_settings(self) -> None:
        """Bits that depend on the settings; a scheduler changes them in every step, on all workers alike."""
        held = [value for group in self._optimizer.param_groups for value in group.values()]
        # A rate in a tensor is written in place; reading it from a GPU would wait.
        now = [float(v) if type(v) is Tensor and v.is_cpu and v.dim() == 0 else v for v in held]
        if len(now) == len(self._settings) and all(map(is_, now, self._settings)):
            return
        self._settings = now
        # Hashes of numbers are the same in every process, those of strings are not.
        self._code = hash(tuple(map(_number, now))) % 2**_NUM_BITS

    def _say(self, message: int) -> None:
        bucket = self._reducer.buckets[0]
        if self._said is None or self._said[0] is not bucket:
            self._messages = _messages(bucket.sent_signals)
        elif self._said[1] == message:
            return
        bucket.sent_signals.copy_(self._messages[message])
        self._said = (bucket, message)

    def _is_due(self, step: int) -> bool:
        """Whether the bits of this step, counted from 1, depend on the parameters' elements."""
        is_early = not self._on_device and not step & (step - 1)
        return step % MOST_APART == 0 or (step > 1 and is_early)

    def _say_content(self) -> None:
        """Have the bits that were said depend on all elements, for this step. Does not wait for a GPU."""
        bucket = self._reducer.buckets[0]
        said = real_of(bucket.sent_signals)[-_NUM_BITS:]
        bits = content_bits([*self._model.parameters()], _NUM_BITS)
        said.copy_((said + bits.to(said)) % 2)
        self._said = (bucket, _UNSAID)  # the next step says the bits of its settings again

    def _hear(self) -> list[float] | None:
        """What the workers said; None where that is not looked at, or has not come to the host yet."""
        signals = real_of(self._reducer.buckets[0].signals)
        if not self._on_device:
            return signals.tolist()
        # Reading the signals waits for the device, so on a GPU it is done seldom, and of long ago.
        if self._num_steps % MOST_APART:
            return None
        before, self._staged = self._staged, self._copied(signals)
        if before is None:
            return None
        before[1].synchronize()  # of 64 steps ago
        return before[0].tolist()

    @staticmethod
    def _copied(signals: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        host = torch.empty(signals.shape, dtype=signals.dtype, pin_memory=True, device="cpu")
        host.copy_(signals, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event


def is_reason(heard: list[float]) -> bool:
    """Whether what the workers said is a reason to compare their state.

    Args:
        heard: Sums over the workers, to one scale: of 1, of whether one wrote, of each bit of the settings.
    """
    all_of_them, written, *bits = heard
    if not all_of_them:  # a step that ended before its gradients were exchanged
        return False
    # A tenth of one among a hundred workers is still distinguished from none, and from rounding.
    slack = all_of_them * 1e-3
    return written > slack or any(slack < bit < all_of_them - slack for bit in bits)


def _number(value: Any) -> float | tuple[float, ...]:
    """A setting, if it is of numbers."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, tuple) and all(isinstance(part, int | float) for part in value):
        return value
    return 0


def _messages(like: Tensor) -> Tensor:
    """All messages, one a row: a 1, whether something was written, and the bits of the settings."""
    numbers = torch.arange(2 ** (_NUM_BITS + 1), device="cpu")
    places = [_NUM_BITS, *range(_NUM_BITS)]
    columns = [torch.ones_like(numbers), *(numbers >> place & 1 for place in places)]
    return torch.stack(columns, 1).to(like)
