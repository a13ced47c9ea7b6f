"""Runs of one training step under perturbations, in the mode to check and as it was written.

From one and the same state both run, while inputs, parameters, learning rate and random state are changed;
`equivalence` judges what they leave.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.capture.capturing import on_stream
from ridgeline.capture.dropout_states import dropout_state, left_as_found
from ridgeline.errors import CaptureError, RidgelineError, first_line
from ridgeline.guards.obstacles import obstacle
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.optimizers.groups import parameters_of
from ridgeline.plan import Precision
from ridgeline.reach.undo import Undo
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks.kept_runs import KeptRuns
from ridgeline.runtime.steps.checks.narrow_rounding import NarrowTypes, move_within_rounding
from ridgeline.runtime.steps.checks.step_difference import Ends, Outcome, Written, moved_to, outcome
from ridgeline.state.random_state import capture, seed_all
from ridgeline.state.snapshot import Snapshot
from ridgeline.tensors.batch import rebuilt
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World

# Powers of two: multiplied by their inverse, rates are afterwards the same to the bit.
LEARNING_RATE_FACTORS = (1.0, 0.5, 2.0)
PARAMETER_FACTORS = (1.0, 1.01, 0.99)
SHIFTS = tuple(range(len(LEARNING_RATE_FACTORS)))
"""All perturbations: of a step that was not compared yet."""
ONE_SHIFT = SHIFTS[-1:]
"""Of another capture of a step that was compared in this process: learning rate, inputs, parameters and
random numbers differ from those of the capture all at once."""
NARROW_DRAWS = 2
"""Runs that show what rounding to 16 bits does where the user's own code casts."""
MOST_NUDGES = 8
"""More runs, at most, from parameters of which each element has other last bits by chance."""
MOST_BITS = 8.0
"""As many times the last bit, at most. Source: on a CPU, convolutions of 64 to 512 channels in both memory
formats are 3.4e-7 to 8.3e-7 of their results apart, and the last bit is 2.4e-7."""
MOST_REPEATS = 6
"""More runs of the step as written, at most, where nothing else explains a gradient: one that adds in no
fixed order may come near to itself in three. Source: 2 of 1,500 checks of a bias before batch norm."""
NUDGES = (1.0, -2.0)
"""Multiples of the last bit by which parameters are changed to find what is rounding."""
LAST_BIT = 2.0**-22
ROUNDED_APART = 2.0**-9
"""Between places at which the step is rounded again: half of the last bit of bf16."""
# Far apart, since perturbations and parameters add numbers of their own to a seed.
_OTHER_DRAWS = 10_000
_SEED = 20_000

Step = Callable[[], Tensor]


class Start:
    """Where all runs begin, and what is there again in the end."""

    def __init__(
        self, body: StepBody, batch: Any, inputs: Sequence[Tensor], *, repeats_python: bool
    ) -> None:
        self._snapshot = Snapshot(body.model, body.optimizer, body.loss_fn, body.synchronizer)
        self.inputs = [tensor.detach() for tensor in inputs]
        self.take_inputs()
        held = parameters_of(body.optimizer)
        # Each step begins without these gradients, whatever holds the parameters.
        gradients = (p.grad for p in held if p.grad is not None)
        spared = (*self._snapshot.tensors(), *inputs, *gradients)
        # A batch may hold more than tensors: a generator, an object that counts.
        self._outside = Undo(body.model, body.loss_fn, batch, spared=spared)
        self._optimizer = Undo(body.optimizer, spared=spared)
        self._repeats_python = repeats_python
        self._at_end = contextlib.ExitStack()
        self._dropping = self._at_end.enter_context(left_as_found(body.model, body.loss_fn))

    @property
    def has_dropout_states(self) -> bool:
        """Whether recurrent layers draw from memory of their own."""
        return bool(self._dropping)

    def make_dropout_states(self) -> None:
        """Have recurrent layers draw from what seeding decides, made before the step draws anything else.

        A replay makes it then, an eager step at its first such layer, after the dropout before it.
        """
        for device in self._dropping:
            dropout_state(device)

    def take_inputs(self) -> None:
        """Have the coming runs begin with the inputs as they are now, perturbed."""
        self._given = [tensor.clone() for tensor in self.inputs]

    def begin(self) -> None:
        """Go back for another run; the optimizer's settings stay.

        What is kept outside of the model in tensors (an average, a teacher) begins again as well: programs
        read it where it lies. Python's own counters and names do not, see `check_replay`. What an optimizer
        of the user's own counts is never baked in: it steps in Python in every mode.
        """
        if self._repeats_python:
            self._outside.restore()
        else:
            self._outside.restore_values()
        self._optimizer.restore()
        self._snapshot.restore(keep_settings=True)
        # A step may write into its batch; on what it left, it would differ from itself by any amount.
        with torch.no_grad():
            for tensor, given in zip(self.inputs, self._given, strict=True):
                tensor.copy_(given)

    def restore(self) -> None:
        """Put everything back."""
        # First what holds the tensors, then their values, which are found by names.
        self._outside.restore()
        self._optimizer.restore()
        self._snapshot.restore()
        self._at_end.close()
        torch.clear_autocast_cache()  # of the weights of the last run

    def written(self) -> dict[str, Written]:
        """What a step wrote besides the model's parameters that it trains.

        Buffers, other networks (of which a learned loss is one), tensors in the loss's reach.
        """
        return {
            what: Written(old, now.detach().clone(), is_shown)
            for is_shown, changes in (
                (False, self._snapshot.changes_beside()),
                (True, self._outside.value_changes()),
            )
            for what, old, now, _ in changes
        }


class PerturbedRuns(NamedTuple):
    """Both ways of running one step; `shift` is the number of a perturbation.

    Every method is collective where there are several workers: all of them run the same. What comparisons
    ask for more than once is kept until the next perturbation.
    """

    body: StepBody
    batch: Any
    start: Start
    rates: LearningRates
    replay: Step
    stream: "torch.cuda.Stream | None"
    world: World
    kept: KeptRuns

    def begun(
        self, shift: int, *, nudge: float = 1.0, moved: Callable[[Any], None] | None = None
    ) -> Outcome:
        """Where the runs begin: back at the start, with changed parameters."""
        self.start.begin()
        factor = PARAMETER_FACTORS[shift] * nudge
        if factor != 1.0:
            with torch.no_grad():
                for parameter in self.body.model.parameters():
                    if parameter.requires_grad:  # so it is floating point, or complex
                        parameter.mul_(factor)
        if moved is not None:
            # After the factor, so that it moves within the rounding of what the run begins with.
            moved(self.body.model.parameters())
        return outcome(0.0, self.body.model, self.body.optimizer, self.start.written())

    def eager(self, shift: int) -> Outcome:
        """The step as written.

        Run again, it may differ from itself: libraries draw numbers that no seed of torch sets, and then the
        loss is another one, too; or they add in no fixed order, which shows where a gradient is nothing but
        rounding.

        Source: cuDNN's recurrent layers keep the state of their dropout to themselves; CTC adds atomically.
        """
        return self._as_written(shift)

    def again(self, shift: int) -> Outcome:
        """The step as written, once more."""
        return self.kept.get(("again", shift), lambda: [self.eager(shift)])[0]

    def tried(self, shift: int) -> Outcome:
        """The step in the mode to check, after it ran as written.

        Raises:
            CaptureError: what ran as written fails in this mode; torch's compiler raises errors of any kind.
        """
        return self._run(self._tried, shift)

    def with_other_draws(self, shift: int, number: int = 0) -> Outcome:
        """The step as written, with other random numbers; other ones for each `number`."""
        seed = (1 + number) * _OTHER_DRAWS
        name = "draws", shift, number
        return self.kept.get(name, lambda: [self._as_written(shift, seed=seed)])[0]

    def draws(self, shift: int) -> bool:
        """Whether the step as written draws random numbers, on any worker.

        One that draws none may differ from itself as well, where libraries add in no fixed order.
        """
        found = [self.start.has_dropout_states]

        def watched() -> Tensor:
            before = capture(self.world)
            loss = self._eager()
            # The generators' states, not the result: a step may draw and throw away.
            found.append(capture(self.world) != before)
            return loss

        with self.body.as_written():
            self._run(watched, shift)
        return bool(largest_of_workers(float(any(found)), self.world))

    def exact(self, shift: int) -> Outcome:
        """The step as written, without the plan's lower precision."""
        name = "exact", shift
        return self.kept.get(name, lambda: [self._as_written(shift, precision="as-is")])[0]

    def rounded(self, shift: int, number: int) -> Ends:
        """A start nearby, and what the step leaves from there without and with the plan's lower precision.

        Each `number` is another place, so that 16 bits round otherwise: the distance between both runs is
        chance, and one may be small.
        """
        # A factor, so that each parameter moves by as much of its own size.
        nudge = 1.0 + (1 + number) * ROUNDED_APART

        def run() -> list[Outcome]:
            begun = self.begun(shift, nudge=nudge)
            exact = self._as_written(shift, precision="as-is", nudge=nudge)
            return [begun, exact, self._as_written(shift, nudge=nudge)]

        return Ends(*self.kept.get(("rounded", shift, number), run))

    def nudged(self, before: Outcome, shift: int) -> list[Outcome]:
        """The step as written from parameters with other last bits, as if it had begun at `before`."""
        nudges = [1.0 + bits * LAST_BIT for bits in NUDGES]
        return self.kept.get(
            ("nudged", shift), lambda: [self._beside(before, shift, nudge=one) for one in nudges]
        )

    def nudged_by_chance(self, before: Outcome, shift: int, number: int) -> Outcome:
        """As `nudged`, each element by chance, by more from `number` to number: sums are rounded often."""
        half_step = LAST_BIT * min(MOST_BITS, 2.0**number)
        return self._moved(before, shift, half_step, seed=(1 + number) * _OTHER_DRAWS)

    def narrowly_moved(self, before: Outcome, shift: int) -> list[Outcome]:
        """Eager steps from parameters that the user's own casts make equal; none where nothing is cast."""
        return self.kept.get(("moved", shift), lambda: self._narrowly_moved(before, shift))

    def by_chance(
        self,
        before: Outcome,
        eager: Outcome,
        shift: int,
        *,
        num_draws: int,
        num_nudges: int,
        num_roundings: int,
    ) -> Iterator[Ends]:
        """Where steps began, and what two of them left that nothing but rounding and chance makes different.

        Args:
            before: Where the runs begin.
            eager: What the step as written left.
            shift: The perturbation.
            num_draws: Steps with other random numbers.
            num_nudges: Steps from parameters of which each element has other last bits, besides those in
                which all have the same ones more or less.
            num_roundings: Places nearby at which the plan's precision is set beside single precision.
        """
        # Cheap explanations first: whoever asks stops at the one that suffices.
        yield Ends(before, eager, self.again(shift))
        for number in range(num_draws):
            yield Ends(before, eager, self.with_other_draws(shift, number))
        for other in (*self.nudged(before, shift), *self.narrowly_moved(before, shift)):
            yield Ends(before, eager, other)
        for number in range(num_nudges):
            yield Ends(before, eager, self.nudged_by_chance(before, shift, number))
        if num_roundings:
            yield Ends(before, eager, self.exact(shift))
        for number in range(num_roundings):
            yield self.rounded(shift, number)
        for _ in range(MOST_REPEATS):
            yield Ends(before, eager, self.eager(shift))

    def moved(self, before: Outcome, shift: int, *, is_cast: bool) -> Iterator[Outcome]:
        """Steps as written that rounding or chance makes different, those that take longest last.

        Args:
            before: Where the runs begin.
            shift: The perturbation.
            is_cast: Whether the plan computes in 16 bits: the step without is one of them.
        """
        yield self.again(shift)
        yield from self.nudged(before, shift)
        if is_cast:  # in another precision libraries prepare all their kernels again
            yield self.exact(shift)
        yield from self.narrowly_moved(before, shift)

    def _narrowly_moved(self, before: Outcome, shift: int) -> list[Outcome]:
        # Only the user's own casts can show this, so the step is watched as it is written.
        watch = NarrowTypes()
        with self.body.as_written(), watch:
            self._run(self._eager, shift)
        half_step = largest_of_workers(watch.half_step, self.world)
        if not half_step:
            return []
        return [self._moved(before, shift, half_step, seed) for seed in range(NARROW_DRAWS)]

    def _moved(self, before: Outcome, shift: int, half_step: float, seed: int) -> Outcome:
        moved = partial(move_within_rounding, half_step=half_step, seed=seed)
        return self._beside(before, shift, moved=moved)

    def _beside(self, before: Outcome, shift: int, **how: Any) -> Outcome:
        """What the step leaves that begins with other parameters, as if it had begun at `before`."""
        got = self._as_written(shift, **how)
        return moved_to(before, self.begun(shift, **how), got)

    def _as_written(self, shift: int, *, precision: Precision | None = None, **how: Any) -> Outcome:
        with self.body.as_written(precision=precision):
            return self._run(self._eager, shift, **how)

    def _tried(self) -> Tensor:
        try:
            return self.replay()
        except (RidgelineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = obstacle(error)
            if what.startswith(first_line(error).rstrip(".")):  # as any operator says it
                what = f"{type(error).__name__}: {what}"
            raise CaptureError(
                f"wanted execution={self.body.plan.execution!r} to run a step that runs as written, got "
                f"{what}; use execution='eager'"
            ) from error

    def _eager(self) -> Tensor:
        with contextlib.nullcontext() if self.stream is None else on_stream(self.stream):
            return self.body(rebuilt(self.batch), Recorder(HostClock()))

    def _run(
        self,
        step: Step,
        shift: int,
        *,
        nudge: float = 1.0,
        seed: int = 0,
        moved: Callable[[Any], None] | None = None,
    ) -> Outcome:
        """What one step from the perturbed start leaves."""
        factor = LEARNING_RATE_FACTORS[shift]
        self.begun(shift, nudge=nudge, moved=moved)
        torch.clear_autocast_cache()  # inside autocast it holds casts of the weights of the last step
        seed_all(_SEED + shift + seed)  # Python's and NumPy's too: what they decide may be baked in
        self.start.make_dropout_states()
        self.rates.scale(factor)
        # Waits for the device, so that what is read below is what this step left.
        try:
            loss = float(step())
        finally:
            self.rates.scale(1.0 / factor)
        return outcome(loss, self.body.model, self.body.optimizer, self.start.written())
