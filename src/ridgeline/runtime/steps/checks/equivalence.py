"""Checking a mode of execution against the plain eager step before it is used.

A captured or compiled step that bakes in a constant trains wrongly and silently. So from one and the same
state both run several steps, while inputs, parameters, learning rate and random state are changed
between them, and must agree. Other settings (weight decay, momentum) are watched by the runners, which
capture again when one changes.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import EquivalenceError
from ridgeline.execution import MODES
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.reach.side_effects import refuse_streams, refusing_writes
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks.allowed_gaps import Gap, agreement_text, few, refusal_text
from ridgeline.runtime.steps.checks.fitting_inputs import fitting_run
from ridgeline.runtime.steps.checks.gradient_gaps import EXACT, ROUNDED, settled
from ridgeline.runtime.steps.checks.kept_runs import KeptRuns
from ridgeline.runtime.steps.checks.perturbation import perturb_inputs
from ridgeline.runtime.steps.checks.perturbed_runs import (
    MOST_NUDGES,
    SHIFTS,
    PerturbedRuns,
    Start,
    Step,
)
from ridgeline.runtime.steps.checks.step_difference import (
    FEW,
    FEW_FACTOR,
    MOST_MOVED,
    SENSITIVITY_FACTOR,
    Ends,
    Noise,
    Outcome,
    difference,
    differences,
    in_units,
    is_directed,
    joined,
    loss_gap,
    noise_of,
    without_most_moved,
    without_still,
    without_turned,
    written_apart,
)
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World

REORDERED, TOLERANCE = 1e-3, 0.008
"""What kernels that add in another order stay below (so near to the eager step, a step is near enough to that
in float32, which need not run), and the largest difference, which a factor of 1.01 of the loss is above."""
NARROW_TOLERANCE = 0.25
"""The same for parameters of 16 bits, whose every update is rounded."""
ROUNDING_FACTOR = 1.5
"""Under 16-bit autocast a compiled or captured step may be this much further from the float32 step than the
eager one is: fused kernels round elsewhere, and in a capture libraries may choose other kernels."""
MOST_ROUNDINGS = 4
"""Places nearby, at most, at which the eager step is rounded again, where one distance alone is too small."""
DRAWS_FACTOR = 1.5
"""A step that draws its own random numbers may be this much further from an eager step than two eager steps
with different draws are from each other: a baked-in constant adds to that distance, other draws do not."""
MOST_DRAWS = 8
"""Other draws of the eager step, at most, beside which a mode that draws its own may be no further away."""
DRAWN = 1e-3
"""Two eager steps that differ by less have drawn nothing: what is between them is the order of additions."""
NARROW_FACTOR = 3.0
"""A parameter's update may differ by this multiple of what such rounding does to it in two draws."""
MOST_ROUNDED = 0.5
"""A parameter whose update such rounding moves by more is left out, and named."""


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
    shifts: Sequence[int] = SHIFTS,
    is_first: bool = False,
) -> None:
    """Run both ways from the present state under perturbations, then go back to that state.

    That includes what the code of model and loss keeps elsewhere: counters, caches.

    Args:
        body: The step; its plain eager form is the reference.
        batch: What the eager step runs on.
        inputs: Its tensors, changed between steps within the range of their values; restored afterwards.
        rates: Scaled between steps; restored afterwards.
        replay: Runs the step in the mode to check, on `inputs`, and returns its loss.
        world: The workers check together and all take the largest difference.
        notes: Receives the largest difference.
        stream: The stream on which the eager step runs; None for the current one.
        runs_python: Whether `replay` does in Python what the eager step does, so that all runs may begin with
            the same counters. With a program or a graph they must not: what it baked in would look right.
        shifts: Numbers of the perturbations.
        is_first: Whether what a first step alone sets up in Python is not set up yet.

    Raises:
        EquivalenceError: they differ by more than the tolerance.
        SideEffectError: the step draws from an iterator or writes to files, which cannot be taken back.

    Cost: Two steps a perturbation, up to a dozen where rounding may explain a difference; `KeptRuns` and
        three copies of what is trained and written, two of the inputs.
    """
    # Before anything runs: what an iterator or a file gave cannot be taken back.
    refuse_streams(body.model, body.loss_fn, body.optimizer, batch)
    originals = [tensor.detach().clone() for tensor in inputs]
    start = Start(body, batch, inputs, repeats_python=runs_python)
    runs = PerturbedRuns(body, batch, start, rates, replay, stream, world, KeptRuns(world))
    gaps = list[Gap]()
    try:
        with refusing_writes():
            if is_first:  # else one run sets it up, which looks like chance
                runs.eager(shifts[0])
            for shift in shifts:
                gaps += _gaps(runs, originals, notes, shift)
    finally:
        perturb_inputs(inputs, originals, 0)
        start.restore()
    widest = max(gaps, key=Gap.excess)
    if widest.size > widest.allowed:
        raise EquivalenceError(refusal_text(body.plan.execution, widest, len(shifts)))
    notes.append(agreement_text(body.plan.execution, gaps, len(shifts)))


def _gaps(
    runs: PerturbedRuns, originals: Sequence[Tensor], notes: list[str], shift: int
) -> list[Gap]:
    """The differences under perturbation number `shift`: of the update, and of what else is written."""
    runs.kept.forget()
    before = runs.begun(shift)

    def as_written() -> Outcome:
        runs.start.take_inputs()
        return runs.eager(shift)

    inputs, mode = runs.start.inputs, runs.body.plan.execution
    eager = fitting_run(as_written, inputs, originals, shift, runs.world, notes, execution=mode)
    trial = _Trial(runs, notes, shift, Ends(before, eager, runs.tried(shift)))
    return [trial.update_gap(), trial.gradient_gap(), trial.written_gap()]


class _Trial(NamedTuple):
    """What runs of one perturbed step left: as written, and in the mode to check."""

    runs: PerturbedRuns
    notes: list[str]
    shift: int
    ends: Ends

    def update_gap(self) -> Gap:
        runs, shift, (before, eager, got) = self.runs, self.shift, self.ends
        narrow, allowed = self._is_narrow(), self._tolerance()
        size = self._difference(got)
        drawn = None
        if size > allowed and self._draws_its_own() and runs.draws(shift):
            drawn = self._drawn_gap(size)
        if drawn is not None:
            return drawn
        noise, others = None, list[Outcome]()
        if size > allowed:
            repeated = runs.again(shift)
            again = self._difference(repeated)
            losses = self._largest(loss_gap(eager, repeated))
            if again > allowed and (narrow or losses > DRAWN):
                return self._beside(again, size, allowed)
            others = [repeated] if again > allowed else []
        if size > allowed and not narrow:
            noise, size = self._noise(others)
            self._name_left_out(noise.names(self.runs.body.model))
        narrow_gap = self._narrow_gap(noise) if size > allowed and not self._casts() else None
        if narrow_gap is not None:
            return narrow_gap
        if size > allowed and others and not self._may_round_elsewhere():
            again = self._difference(runs.eager(shift), noise)
            return self._beside(again, size, allowed)
        if size <= REORDERED or not self._may_round_elsewhere():
            return Gap(size, allowed, "the eager step")
        exact = runs.exact(shift)
        ends = Ends(before, exact, got)
        moves = in_units(ends._replace(got=eager), noise, TOLERANCE)
        size = self._largest(difference(ends, noise, TOLERANCE))
        rounding = self._largest(max(moves))
        for number in range(MOST_ROUNDINGS):
            if size <= max(allowed, ROUNDING_FACTOR * rounding):
                break
            other = in_units(runs.rounded(shift, number), noise, TOLERANCE)
            moves = [*map(max, moves, other)]
            rounding = max(rounding, self._largest(max(other)))
        else:
            is_kept = [True, *(move <= MOST_ROUNDED for move in moves[1:])]
            turned = without_turned(ends, noise).leaving_out(is_kept)
            self._name_left_out(turned.names(runs.body.model))
            size = self._largest(difference(ends, turned, TOLERANCE, moves=moves))
            rounding = self._largest(max(itertools.compress(moves, is_kept)))
        name = f"the float32 step (from which the eager one is {rounding:.1e} away)"
        return Gap(size, max(allowed, ROUNDING_FACTOR * rounding), name)

    def _noise(self, others: Sequence[Outcome]) -> tuple[Noise, float]:
        """What rounding decides, and the difference beside it.

        Two runs say little of that where single numbers next to zero decide. While what is left has no
        direction, there are more.
        """
        runs, (before, eager, got) = self.runs, self.ends
        nudged = [*runs.nudged(before, self.shift), *others]
        noise = without_still(self.ends, noise_of(before, eager, nudged))
        size = self._difference(got, noise)
        for number in range(0 if self._casts() else MOST_NUDGES):
            is_wrong = is_directed(self.ends, noise, TOLERANCE)
            if size <= TOLERANCE or self._largest(is_wrong):
                break
            other = runs.nudged_by_chance(before, self.shift, number)
            noise = joined(noise, noise_of(before, eager, [other]))
            size = self._difference(got, noise)
        return noise, size

    def gradient_gap(self) -> Gap:
        """The difference of each parameter's gradient, beside what rounding and chance do to it alone."""
        is_rounded = self.runs.body.plan.precision != "as-is"  # in fewer bits than the model has
        chances = self.runs.by_chance(
            self.ends.before,
            self.ends.wanted,
            self.shift,
            num_draws=MOST_DRAWS if self._draws_its_own() else 0,
            num_nudges=0 if is_rounded else MOST_NUDGES,
            num_roundings=MOST_ROUNDINGS if is_rounded else 0,
        )
        limit = ROUNDED if self._is_narrow() or is_rounded else EXACT
        size, owner, limit = settled(self.ends, chances, limit, self._largest)
        has_any = self.ends.wanted.parameters
        of = f"the gradient of {self._trained()[owner]}" if has_any else "no gradient"
        return Gap(self._largest(size) * limit.floor, limit.floor, "the eager step", of)

    def _drawn_gap(self, size: float) -> Gap | None:
        """The difference beside what other random numbers do; None where the step draws none.

        Beyond that, it is looked at once more without what rounding alone decides: there one draw may be any
        number of times as far from the next as a third.
        """
        apart = self._apart_by_draws(size)
        if apart <= DRAWN:
            return None
        if size > DRAWS_FACTOR * apart:
            before, eager, _ = self.ends
            noise = noise_of(before, eager, self.runs.nudged(before, self.shift))
            self._name_left_out(noise.names(self.runs.body.model))
            size = self._difference(self.ends.got, noise)
            apart = self._apart_by_draws(size, noise)
        name = f"the eager step in distribution (two of whose draws are {apart:.1e} apart)"
        return Gap(size, max(self._tolerance(), DRAWS_FACTOR * apart), name)

    def _apart_by_draws(self, size: float, noise: Noise | None = None) -> float:
        """How far other draws are from the first at most, of as many as it takes to explain a size."""
        apart = 0.0
        for number in range(MOST_DRAWS):
            other = self.runs.with_other_draws(self.shift, number)
            apart = max(apart, self._difference(other, noise))
            if apart <= DRAWN or size <= DRAWS_FACTOR * apart:
                break
        return apart

    def written_gap(self) -> Gap:
        """The difference of what is written besides, beside what rounding and chance do to each tensor."""
        allowed = self._tolerance()
        before, eager, got = self.ends
        found = written_apart(eager, got)
        size = self._largest(max(found.values(), default=0.0))
        name = max(found, key=found.__getitem__, default="nothing")
        if size <= allowed:
            return Gap(size, allowed, "the eager step", f"the change of {name}")
        moves = dict.fromkeys(found, 0.0)
        for other in self.runs.moved(before, self.shift, is_cast=self._casts()):
            apart = written_apart(eager, other)
            moves = {one: max(move, apart.get(one, 0.0)) for one, move in moves.items()}
            explained = (max(allowed, SENSITIVITY_FACTOR * move) for move in moves.values())
            if not self._largest(float(any(map(float.__gt__, found.values(), explained)))):
                break
        left_out, limits = list[str](), dict[str, float]()
        for one, move in moves.items():
            if move > MOST_MOVED and found[one] > allowed:
                left_out.append(one)
            else:
                limits[one] = max(allowed, SENSITIVITY_FACTOR * move)
        if left_out:
            self._note(
                f"rounding or chance decides what a step writes into {few(left_out)}, so this"
            )
        found = {one: found[one] / limit for one, limit in limits.items()}
        if self._draws_its_own():
            found = self._beside_draws(found, limits)
        name = max(found, key=found.__getitem__, default="nothing")
        size = self._largest(max(found.values(), default=0.0))
        return Gap(size * allowed, allowed, "the eager step", f"the change of {name}")

    def _beside_draws(self, found: dict[str, float], limits: dict[str, float]) -> dict[str, float]:
        """What was found, in units of its limits, where these allow for what other random numbers do.

        One other draw says little of the spread of a few numbers: it may be as near by chance as the mode's
        is far. So there are more until nothing is beyond its limit.
        """
        moves, ratios = dict.fromkeys(found, 0.0), found
        for number in range(MOST_DRAWS):
            if self._largest(max(ratios.values(), default=0.0)) <= 1.0:
                break
            other = self.runs.with_other_draws(self.shift, number)
            apart = written_apart(self.ends.wanted, other)
            moves = {one: max(move, apart.get(one, 0.0)) for one, move in moves.items()}
            factors = {
                one: FEW_FACTOR if w.now.numel() < FEW else DRAWS_FACTOR
                for one, w in self.ends.wanted.written.items()
            }
            ratios = {
                one: ratio / max(1.0, factors.get(one, DRAWS_FACTOR) * moves[one] / limits[one])
                for one, ratio in found.items()
            }
        return ratios

    def _difference(self, got: Outcome, noise: Noise | None = None) -> float:
        """From the step as written."""
        ends = self.ends._replace(got=got)
        return self._largest(difference(ends, noise, TOLERANCE))

    def _largest(self, value: float) -> float:
        """Of the workers': what follows from it, steps with collectives too, they do together."""
        return largest_of_workers(value, self.runs.world)

    def _name_left_out(self, names: list[str]) -> None:
        if names:
            self._note(f"rounding alone decides the update of {few(names)}, so this")

    def _note(self, what: str) -> None:
        note = f"{what} was not compared"
        if note not in self.notes:
            self.notes.append(note)

    def _beside(self, again: float, size: float, allowed: float) -> Gap:
        """A difference beside that of the eager step from itself."""
        name = f"the eager step in distribution (which differs by {again:.1e} from itself)"
        return Gap(size, max(allowed, DRAWS_FACTOR * again), name)

    def _narrow_gap(self, noise: Noise | None) -> Gap | None:
        """The difference beside what rounding does where the user's own code casts; None in other steps."""
        before, eager, _ = self.ends
        others = self.runs.narrowly_moved(before, self.shift)
        if not others:
            return None
        noise = without_most_moved(eager, others, noise)
        runs = [differences(self.ends._replace(got=other), noise) for other in others]
        moves = [max(values) for values in zip(*runs, strict=True)]
        names = ["", *self._trained()]
        is_kept = [move <= MOST_ROUNDED for move in moves]
        self._name_left_out([n for n, kept in zip(names, is_kept, strict=True) if not kept])
        found = differences(self.ends, noise)
        pairs = [*itertools.compress(zip(found, moves, strict=True), is_kept)]
        ratios = [gap / max(TOLERANCE, NARROW_FACTOR * move) for gap, move in pairs]
        size, worst = (
            self._largest(max(values, default=0.0))
            for values in ([gap for gap, _ in pairs], ratios)
        )
        most = max((move for _, move in pairs), default=0.0)
        name = f"the eager step (which rounding to 16 bits moves by {most:.1e})"
        return Gap(size, size / worst if worst else TOLERANCE, name)

    def _trained(self) -> list[str]:
        """Names of the parameters whose outcomes are compared, in their order."""
        return [n for n, p in self.runs.body.model.named_parameters() if p.requires_grad]

    def _tolerance(self) -> float:
        return NARROW_TOLERANCE if self._is_narrow() else TOLERANCE

    def _is_narrow(self) -> bool:
        return any(p.dtype.itemsize <= 2 for p in self.runs.body.model.parameters())

    def _casts(self) -> bool:
        """Whether the plan computes in 16 bits, so that the step in 32 is the one to compare with."""
        return self.runs.body.plan.precision in ("bf16", "fp16")

    def _draws_its_own(self) -> bool:
        plan = self.runs.body.plan
        return plan.random == "compiled" and MODES[plan.execution].is_compiled

    def _may_round_elsewhere(self) -> bool:
        mode = MODES[self.runs.body.plan.execution]
        return self._casts() and (mode.is_compiled or mode.is_captured)
