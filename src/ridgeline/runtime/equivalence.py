"""Checking a mode of execution against the plain eager step before it is used.

A captured or compiled step that bakes in a constant trains wrongly and silently. So from one and the same
state both run several steps, while inputs, parameters, learning rate and random state are changed
between them, and must agree. Other settings (weight decay, momentum) are watched by the runners, which
capture again when one changes.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import CaptureError, EquivalenceError, RidgelineError, first_line
from ridgeline.execution import MODES
from ridgeline.reach.side_effects import refuse_streams, refusing_writes
from ridgeline.reach.undo import Undo
from ridgeline.runtime.agree import largest_of_workers
from ridgeline.runtime.body import StepBody
from ridgeline.runtime.capturable import LearningRates
from ridgeline.runtime.capturing import on_stream
from ridgeline.runtime.clocks import HostClock
from ridgeline.runtime.narrow_rounding import NarrowTypes, move_within_rounding
from ridgeline.runtime.perturbation import perturb_inputs
from ridgeline.runtime.random_state import seed_all
from ridgeline.runtime.recorder import Recorder
from ridgeline.runtime.snapshot import Snapshot
from ridgeline.runtime.step_difference import (
    Noise,
    Outcome,
    difference,
    differences,
    moved_to,
    noise_of,
    outcome,
    without_most_moved,
)
from ridgeline.runtime.world import World

LEARNING_RATE_FACTORS = (1.0, 0.5, 2.0)
PARAMETER_FACTORS = (1.0, 1.01, 0.99)
TOLERANCE = 0.008
"""Largest accepted difference, see `step_difference`. Kernels that add in another order stay below 1e-3; a
learning rate or a factor of the loss that is wrong by 1 % is above it."""
NARROW_TOLERANCE = 0.25
"""The same for parameters of 16 bits, whose every update is rounded."""
ROUNDING_FACTOR = 1.5
"""Under 16-bit autocast a compiled or captured step may be this much further from the float32 step than the
eager one is: fused kernels round at other places, and libraries choose other kernels where a capture gives
them other workspaces, neither less nor more exact on purpose."""
DRAWS_FACTOR = 1.5
"""A step that draws its own random numbers may be this much further from an eager step than two eager steps
with different draws are from each other: a baked-in constant adds to that distance, other draws do not."""
DRAWN = 1e-3
"""Two eager steps that differ by less have drawn nothing: what is between them is the order of additions."""
NARROW_DRAWS = 2
"""Runs that show what rounding to 16 bits does where the user's own code casts."""
NARROW_FACTOR = 3.0
"""A parameter's update may differ by this multiple of what such rounding does to it in two draws."""
MOST_ROUNDED = 0.5
"""A parameter whose update such rounding moves by more is left out, and named."""
_OTHER_DRAWS = 10_000
NUDGES = (1.0, -2.0)
"""Multiples of the last bit by which parameters are changed to find what is rounding."""
LAST_BIT = 2.0**-22
_SEED = 20_000
MOST_NAMED = 3

Step = Callable[[], Tensor]


def check_replay(
    body: StepBody,
    batch: Any,
    inputs: Sequence[Tensor],
    rates: LearningRates,
    replay: Step,
    *,
    world: World,
    notes: list[str],
    stream: "torch.cuda.Stream | None" = None,
    runs_python: bool = False,
) -> None:
    """Run both ways from the present state under perturbations, then go back to that state.

    That includes what the code of model and loss keeps elsewhere: counters, caches, hidden states.

    Args:
        body: The step; its plain eager form is the reference.
        batch: What the eager step runs on; its tensors are `inputs`.
        inputs: Changed between steps, within the range of their values; restored afterwards.
        rates: Scaled between steps; restored afterwards.
        replay: Runs the step in the mode to check, on `inputs`, and returns its loss.
        world: The workers check together and all take the largest difference.
        notes: Receives the largest difference.
        stream: The stream on which the eager step runs; None for the current one.
        runs_python: Whether `replay` does in Python what the eager step does there, so that all runs may
            begin with the same counters and hidden states. For a program or a graph they must not: what it
            baked in would look right.

    Raises:
        EquivalenceError: they differ by more than the tolerance.
        SideEffectError: the step draws from an iterator or writes to files, which nobody can take back.

    Cost: Six steps (nine when compiled in 16 bits, or where rounding may explain a difference) and
    three copies of parameters, buffers and optimizer state (one of other networks that the loss reads).
    """
    refuse_streams(body.model, body.loss_fn, body.optimizer)
    originals = [tensor.detach().clone() for tensor in inputs]
    start = _Start(body, inputs, repeats_python=runs_python)
    trial = _Trial(body, batch, start, rates, replay, stream, world, notes)
    try:
        gaps = []
        for shift in range(len(LEARNING_RATE_FACTORS)):
            perturb_inputs(inputs, originals, shift)
            with refusing_writes():
                gaps.append(trial.gap(shift))
    finally:
        perturb_inputs(inputs, originals, 0)
        start.restore()
    widest = max(gaps, key=lambda gap: gap.size / gap.allowed)
    if widest.size > widest.allowed:
        raise EquivalenceError(
            f"wanted execution={body.plan.execution!r} to equal the eager step within "
            f"{widest.allowed:.2g} of the update, got a difference of {widest.size:.3g} over {len(gaps)} "
            "perturbed steps; something in the step is baked in (a Python number, host randomness), or "
            "random numbers are drawn in another order (those of a transposed tensor): use "
            "execution='eager'"
        )
    notes.append(
        f"{body.plan.execution} equals {widest.reference} within {widest.size:.1e} of the update "
        f"({len(gaps)} steps; inputs, parameters, learning rate and random state perturbed)"
    )


class _Start:
    """Where all runs begin, and what is there again in the end."""

    def __init__(self, body: StepBody, inputs: Sequence[Tensor], *, repeats_python: bool) -> None:
        self._snapshot = Snapshot(body.model, body.optimizer, body.loss_fn)
        spared = (*self._snapshot.tensors(), *inputs)
        self._outside = Undo(body.model, body.loss_fn, spared=spared)
        self._optimizer = Undo(body.optimizer, spared=spared)
        self._repeats_python = repeats_python

    def begin(self) -> None:
        """Go back for another run; the optimizer's settings stay.

        What is kept outside of the model in tensors (an average, a teacher) begins anew as well: programs
        read it where it lies. Python's own counters and names do not, see `check_replay`. What an optimizer
        of the user's own counts is never baked in: it steps in Python in every mode.
        """
        if self._repeats_python:
            self._outside.restore()
        else:
            self._outside.restore_values()
        self._optimizer.restore()
        self._snapshot.restore(keep_settings=True)

    def restore(self) -> None:
        """Put everything back."""
        self._outside.restore()
        self._optimizer.restore()
        self._snapshot.restore()


class _Gap(NamedTuple):
    """How far the mode is from its reference in one perturbed step, and how far it may be."""

    size: float
    allowed: float
    reference: str


class _Trial(NamedTuple):
    """Both ways of running one perturbed step."""

    body: StepBody
    batch: Any
    start: "_Start"
    rates: LearningRates
    replay: Step
    stream: "torch.cuda.Stream | None"
    world: World
    notes: list[str]

    def gap(self, shift: int) -> _Gap:
        """The difference under perturbation number `shift`."""
        before = _perturbed_parameters(self.body, self.start, shift)
        with self.body.as_written():
            eager = self._run(self._eager, shift)
        got = self._run(self._tried, shift)
        narrow = any(p.dtype.itemsize <= 2 for p in self.body.model.parameters())
        allowed = NARROW_TOLERANCE if narrow else TOLERANCE
        size = self._difference(before, eager, got)
        if size > allowed and self._draws_its_own():
            apart = self._apart(before, eager, shift)
            if apart > DRAWN:
                name = f"the eager step in distribution (two of whose draws are {apart:.1e} apart)"
                return _Gap(size, max(allowed, DRAWS_FACTOR * apart), name)
        noise, others = None, list[Outcome]()
        if size > allowed:
            repeated = self._repeated(shift)
            again = self._difference(before, eager, repeated)
            if again > allowed and (narrow or self._loss_apart(eager, repeated) > DRAWN):
                return self._beside(again, size, allowed)
            others = [repeated] if again > allowed else []
        if size > allowed and not narrow:
            nudged = [self._run_nudged(shift, bits) for bits in NUDGES]
            noise = noise_of(before, eager, [*nudged, *others])
            size = self._difference(before, eager, got, noise)
            self._name_noise(noise)
        if size > allowed and not self._casts():
            narrow_gap = self._narrow_gap(before, eager, got, noise, shift)
            if narrow_gap is not None:
                return narrow_gap
        if size > allowed and others:
            return self._beside(
                self._difference(before, eager, self._repeated(shift), noise), size, allowed
            )
        if not self._may_round_elsewhere():
            return _Gap(size, allowed, "the eager step")
        with self.body.as_written(precision="as-is"):
            exact = self._run(self._eager, shift)
        rounding = self._difference(before, exact, eager, noise)
        allowed = max(allowed, ROUNDING_FACTOR * rounding)
        name = f"the float32 step (from which the eager one is {rounding:.1e} away)"
        return _Gap(self._difference(before, exact, got, noise), allowed, name)

    def _difference(
        self, before: Outcome, wanted: Outcome, got: Outcome, noise: Noise | None = None
    ) -> float:
        """The largest of the workers': what follows from it, steps with collectives too, they do together."""
        return largest_of_workers(difference(before, wanted, got, noise, TOLERANCE), self.world)

    def _name_noise(self, noise: Noise) -> None:
        self._name_left_out(noise.names(self.body.model))

    def _name_left_out(self, names: list[str]) -> None:
        if names:
            shown = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
            note = f"rounding alone decides the update of {shown}, so this was not compared"
            if note not in self.notes:
                self.notes.append(note)

    def _apart(self, before: Outcome, eager: Outcome, shift: int) -> float:
        """How far an eager step with other random numbers is from the eager step."""
        with self.body.as_written():
            other = self._run(self._eager, shift, seed=_OTHER_DRAWS)
        return self._difference(before, eager, other)

    def _repeated(self, shift: int) -> Outcome:
        """The eager step once more, which may differ from itself.

        Libraries draw numbers that no seed of torch sets, and then the loss is another one, too; or they add
        in no fixed order, which shows where a gradient is nothing but rounding.

        Source: cuDNN's recurrent layers keep the state of their dropout to themselves; CTC adds atomically.
        """
        with self.body.as_written():
            return self._run(self._eager, shift)

    def _beside(self, again: float, size: float, allowed: float) -> _Gap:
        """A difference beside that of the eager step from itself."""
        name = f"the eager step in distribution (which differs by {again:.1e} from itself)"
        return _Gap(size, max(allowed, DRAWS_FACTOR * again), name)

    def _loss_apart(self, eager: Outcome, other: Outcome) -> float:
        gap = abs(eager.loss - other.loss) / max(abs(eager.loss), 1e-12)
        return largest_of_workers(gap, self.world)

    def _narrow_gap(
        self, before: Outcome, eager: Outcome, got: Outcome, noise: Noise | None, shift: int
    ) -> _Gap | None:
        """The difference beside what rounding does where the user's own code casts; None in other steps."""
        others = self._narrowly_moved(before, shift)
        if not others:
            return None
        noise = without_most_moved(eager, others, noise)
        runs = [differences(before, eager, other, noise) for other in others]
        moves = [max(values) for values in zip(*runs, strict=True)]
        names = ["", *(name for name, p in self.body.model.named_parameters() if p.requires_grad)]
        is_kept = [move <= MOST_ROUNDED for move in moves]
        self._name_left_out([n for n, kept in zip(names, is_kept, strict=True) if not kept])
        found = differences(before, eager, got, noise)
        pairs = [*itertools.compress(zip(found, moves, strict=True), is_kept)]
        ratios = [gap / max(TOLERANCE, NARROW_FACTOR * move) for gap, move in pairs]
        size, worst = (
            largest_of_workers(max(values, default=0.0), self.world)
            for values in ([gap for gap, _ in pairs], ratios)
        )
        most = max((move for _, move in pairs), default=0.0)
        name = f"the eager step (which rounding to 16 bits moves by {most:.1e})"
        return _Gap(size, size / worst if worst else TOLERANCE, name)

    def _narrowly_moved(self, before: Outcome, shift: int) -> list[Outcome]:
        """Eager steps from parameters that such rounding makes equal; none where nothing is cast."""
        watch = NarrowTypes()
        with self.body.as_written(), watch:
            self._run(self._eager, shift)
        half_step = largest_of_workers(watch.half_step, self.world)
        if not half_step:
            return []
        found = []
        for seed in range(NARROW_DRAWS):
            moved = partial(move_within_rounding, half_step=half_step, seed=seed)
            with self.body.as_written():
                other = self._run(self._eager, shift, moved=moved)
            begun = _perturbed_parameters(self.body, self.start, shift, moved=moved)
            found.append(moved_to(before, begun, other))
        return found

    def _casts(self) -> bool:
        """Whether the plan computes in 16 bits, so that the step in 32 is the one to compare with."""
        return self.body.plan.precision in ("bf16", "fp16")

    def _draws_its_own(self) -> bool:
        plan = self.body.plan
        return plan.random == "compiled" and MODES[plan.execution].is_compiled

    def _may_round_elsewhere(self) -> bool:
        mode = MODES[self.body.plan.execution]
        return self._casts() and (mode.is_compiled or mode.is_captured)

    def _tried(self) -> Tensor:
        """The step in the mode to check, after it ran as written.

        Raises:
            CaptureError: what ran as written fails in this mode; torch's compiler raises errors of any kind.
        """
        try:
            return self.replay()
        except (RidgelineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CaptureError(
                f"wanted execution={self.body.plan.execution!r} to run a step that runs as written, got "
                f"{type(error).__name__}: {first_line(error)}; use execution='eager'"
            ) from error

    def _eager(self) -> Tensor:
        silent = Recorder(HostClock())
        if self.stream is None:
            return self.body(self.batch, silent)
        with on_stream(self.stream):
            return self.body(self.batch, silent)

    def _run_nudged(self, shift: int, bits: float) -> Outcome:
        """The eager step from parameters that differ in their last bits."""
        with self.body.as_written():
            return self._run(self._eager, shift, nudge=1.0 + bits * LAST_BIT)

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
        _perturbed_parameters(self.body, self.start, shift, nudge=nudge, moved=moved)
        torch.clear_autocast_cache()  # inside autocast it holds casts of the weights of the last step
        seed_all(_SEED + shift + seed)  # Python's and NumPy's too: what they decide may be baked in
        self.rates.scale(factor)
        loss = float(step())
        self.rates.scale(1.0 / factor)
        return outcome(loss, self.body.model, self.body.optimizer)


def _perturbed_parameters(
    body: StepBody,
    start: "_Start",
    shift: int,
    *,
    nudge: float = 1.0,
    moved: Callable[[Any], None] | None = None,
) -> Outcome:
    """Go back to the start and change the parameters; what there is then."""
    start.begin()
    factor = PARAMETER_FACTORS[shift] * nudge
    if factor != 1.0:
        with torch.no_grad():
            for parameter in body.model.parameters():
                if parameter.requires_grad:  # so it is floating point, or complex
                    parameter.mul_(factor)
    if moved is not None:
        moved(body.model.parameters())
    return outcome(0.0, body.model, body.optimizer)
