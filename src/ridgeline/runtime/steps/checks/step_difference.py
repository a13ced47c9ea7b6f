"""How far two ways of running one training step are apart.

Four things are compared: the loss, the update of the parameters, the change of the optimizer's state, and
what else the step wrote (buffers, averages, teachers).

An optimizer like Adam makes whole steps of gradients that are nothing but rounding (a bias before batch norm,
the bias of attention's keys): such elements of an update differ from run to run, and say nothing. They are
found by runs from parameters that differ in their last bit, and left out; the optimizer's state holds the
gradients as they are, so that nothing else can hide behind them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.optimizers.groups import state_methods
from ridgeline.runtime.steps.checks.relative_gaps import (
    RESOLUTION,
    Compared,
    alignment,
    counts,
    relative_gaps,
)
from ridgeline.tensors.copies import at_once, real_parts

NOISE = 0.01
"""An element of an update is rounding if a change of the parameters' last bit moves it by more of itself."""
NAMED_SHARE = 0.1
"""A parameter of whose elements more than this are rounding is left out, and named."""
SENSITIVITY_FACTOR = 4.0
"""What is left may differ by this multiple of what the last bit does to it: next to nothing, as a rule."""
MOST_MOVED = 0.05
"""A parameter whose update or state the last bit moves by more is left out, and named, too."""
MOST_ALIGNED = 0.7
"""What is moved by rounding lies less than this along an update: ReLU's gradients turn on or off for single
numbers next to zero. A wrong factor lies along it."""
MOST_LOSS = 1e-4
"""Nor does that move the loss by more: what jumps are gradients."""
SPARED = 16
OUTLIERS, OUTLIER_FACTOR = 20, 2.0
"""One parameter in so many may be this much further than the others: of 80 that rounding moves, the furthest.

Source: a U-Net of 4 levels in bfloat16 on an H200, whose compiled step, which is right, is 1.67 times as far
from the float32 step as the eager one in the worst of its parameters.
"""
FEW, FEW_FACTOR = 32, 3.0
"""A tensor of fewer elements may be this much further. Source: of ten normal numbers, the second is beyond
three times as far from the first as each of the others in 1 of 1,800 cases, beyond 1.5 times in 1 of 42."""
MOST_TURNED, TURNED_SHARE = 4, 0.01
"""Elements of a parameter, and their part of it, whose sign one run may have by chance."""


class Written(NamedTuple):
    """A tensor that no optimizer trains, before and after a step that changed it.

    `is_shown`: it is no module's. A replay writes where the step has shown something (an activation, say) or
    left a gradient, and a step as written shows another tensor.
    """

    before: Tensor
    now: Tensor
    is_shown: bool = False


class Outcome(NamedTuple):
    """What a step leaves: its loss, the parameters that are trained, and the optimizer's state of each.

    `written` is what it changed besides, by name.
    """

    loss: float
    parameters: list[Tensor]
    state: list[list[Tensor]]
    written: Mapping[str, Written] = {}

    def is_finite(self) -> bool:
        """Whether the loss and all parameters are numbers.

        Cost: Waits for the device.
        """
        return math.isfinite(self.loss) and all(_are_finite(self.parameters))


class Ends(NamedTuple):
    """Where two ways of running a step began, and what each left: the reference, and what is compared."""

    before: Outcome
    wanted: Outcome
    got: Outcome


def outcome(
    loss: float, model: nn.Module, optimizer: Optimizer, written: Mapping[str, Written]
) -> Outcome:
    """Copies of what there is after a step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    read = state_methods(optimizer).get
    kept: list[dict[str, Any]] = [read(optimizer.state, p, {}) for p in trained]
    state = [
        [_dense_copy(v) for v in values.values() if isinstance(v, Tensor) and v.dim()]
        for values in kept
    ]
    return Outcome(loss, [*map(_dense_copy, trained)], state, written)


def _dense_copy(tensor: Tensor) -> Tensor:
    """Momentum of sparse gradients is sparse, as a weight may be: what it stands for is compared."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.layout is torch.strided else tensor.to_dense()


def moved_to(start: Outcome, begun: Outcome, got: Outcome) -> Outcome:
    """What a run left that began elsewhere, with parameters as if it had begun at `start`."""
    pairs = zip(start.parameters, begun.parameters, got.parameters, strict=True)
    return got._replace(parameters=[old + (new - first) for old, first, new in pairs])


class Noise(NamedTuple):
    """What rounding decides: elements of each parameter's update, and how far all else moves.

    Attributes:
        masks: The elements, one mask for each trained parameter.
        moves: What `differences` gives for the runs that were nudged, the largest of them.
        counts: How many elements there are in each mask.
    """

    masks: list[Tensor]
    moves: list[float]
    counts: list[int]

    def is_left_out(self, index: int) -> bool:
        """Whether a parameter is mostly rounding: its elements, or its gradient as a whole."""
        share = self.counts[index] / max(1, self.masks[index].numel())
        return share > NAMED_SHARE or (bool(self.moves) and self.moves[1 + index] > MOST_MOVED)

    def leaving_out(self, is_kept: Sequence[bool]) -> "Noise":
        """The same without what is not kept of the loss and the parameters."""
        pairs = zip(self.moves, is_kept, strict=True)
        return self._replace(moves=[move if kept else math.inf for move, kept in pairs])

    def names(self, model: nn.Module) -> list[str]:
        """The parameters that are left out."""
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        return [name for index, name in enumerate(trained) if self.is_left_out(index)]


def joined(one: Noise, other: Noise) -> Noise:
    """What either says that rounding decides."""
    masks = [mine | theirs for mine, theirs in zip(one.masks, other.masks, strict=True)]
    return Noise(masks, [*map(max, one.moves, other.moves)], counts(masks))


def noise_of(before: Outcome, wanted: Outcome, nudged: Sequence[Outcome]) -> Noise:
    """What runs from parameters with another last bit do otherwise."""
    masks = []
    for index, (old, new) in enumerate(zip(before.parameters, wanted.parameters, strict=True)):
        update = (new - old).abs()
        moved = torch.zeros_like(update, dtype=torch.bool)
        for other in nudged:
            moved |= (other.parameters[index] - new).abs() > NOISE * update
        # Of no update every move is more than its hundredth part; `without_still` judges those.
        masks.append(moved & (update > 0))
    quiet = Noise(masks, [], counts(masks))
    found = [differences(Ends(before, wanted, other), quiet) for other in nudged]
    return quiet._replace(moves=[max(values) for values in zip(*found, strict=True)])


def without_most_moved(wanted: Outcome, others: Sequence[Outcome], noise: Noise | None) -> Noise:
    """Noise with one element in `SPARED` of each parameter as well: those that other runs move the furthest.

    Rounding to 16 bits turns the sign of single elements, of which Adam makes whole steps.
    """
    masks = []
    for index, new in enumerate(wanted.parameters):
        moved = torch.stack([(other.parameters[index] - new).abs() for other in others]).amax(0)
        mask = torch.zeros(new.numel(), dtype=torch.bool, device=new.device)
        mask[moved.flatten().topk(moved.numel() // SPARED).indices] = True
        mask = mask.view(new.shape)
        masks.append(mask if noise is None else mask | noise.masks[index])
    return Noise(masks, [] if noise is None else noise.moves, counts(masks))


def without_still(ends: Ends, noise: Noise) -> Noise:
    """Noise with the parameters as well that the reference leaves alone and rounding moves.

    A gradient that is exactly nothing where sums are made in one order is next to nothing in another, of
    which Adam makes whole steps. It is known by what optimizers average: nothing in the reference, and in the
    other outcome no more than the resolution of what the largest gradient leaves.

    Cost: Waits for the device once for each parameter, and where the reference leaves one alone, for each
        tensor of the optimizer's state.
    """
    before, wanted, got = ends
    pairs = zip(before.parameters, wanted.parameters, strict=True)
    still = [index for index, (old, new) in enumerate(pairs) if torch.equal(old, new)]
    still = [i for i in still if wanted.state[i] and not any(map(torch.any, wanted.state[i]))]
    if not still:
        return noise
    sizes = [map(_root_mean_square, state) for state in wanted.state]
    largest = [max(found) for found in itertools.zip_longest(*sizes, fillvalue=0.0)]
    moves = [*noise.moves]
    for index in still:
        mine = map(_root_mean_square, got.state[index])
        if all(size <= RESOLUTION * most for size, most in zip(mine, largest, strict=False)):
            moves[1 + index] = math.inf
    return noise._replace(moves=moves)


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.abs().double().square().mean().sqrt()) if tensor.numel() else 0.0


def without_turned(ends: Ends, noise: Noise | None) -> Noise:
    """Noise with the few elements as well that are updated in the other direction.

    What is next to nothing gets its sign by rounding, of which an optimizer like Adagrad makes a whole step:
    in a small network one run has some such elements, and another none. Where there are more, they show
    something.
    """
    masks = []
    triples = zip(*(outcome.parameters for outcome in ends), strict=True)
    turned = [(new - old).sign() * (other - old).sign() < 0 for old, new, other in triples]
    for index, (mask, count) in enumerate(zip(turned, counts(turned), strict=True)):
        is_chance = count <= min(MOST_TURNED, TURNED_SHARE * mask.numel())
        chosen = mask if is_chance else torch.zeros_like(mask)
        masks.append(chosen if noise is None else chosen | noise.masks[index])
    # `_limits` wants one for the loss and one for each parameter.
    moves = [0.0] * (1 + len(masks)) if noise is None else noise.moves
    return Noise(masks, moves, counts(masks))


def differences(ends: Ends, noise: Noise | None = None) -> list[float]:
    """The losses' relative difference, and for each parameter that of its update and of its state.

    Args:
        ends: Of both ways.
        noise: Elements to leave out. As many others that are furthest apart are left out as well: rounding
            that no nudge has shown.
    """
    _, wanted, got = ends
    found = [loss_gap(wanted, got)]
    found += [0.0 if noise is None or not lost else math.inf for lost in _lost(wanted, got)]
    for index, (mine, theirs) in enumerate(zip(wanted.state, got.state, strict=True)):
        is_left_out = noise is not None and noise.is_left_out(index)
        if len(mine) != len(theirs) and not is_left_out:
            found[1 + index] = math.inf
    owned = _compared(ends, noise)
    gaps = relative_gaps([one for _, one in owned])
    for (owner, _), gap in zip(owned, gaps, strict=True):
        found[owner] = gap if math.isnan(gap) else max(found[owner], gap)
    return found


def loss_gap(wanted: Outcome, got: Outcome) -> float:
    """The losses' relative difference."""
    # A loss of 0 has no size to divide by.
    return abs(wanted.loss - got.loss) / max(abs(wanted.loss), 1e-12)


def _compared(ends: Ends, noise: Noise | None) -> list[tuple[int, Compared]]:
    """The tensors of `differences`, each with the place there of what it belongs to."""
    found: list[tuple[int, Compared]] = []
    for index, tensors in enumerate(zip(*(one.parameters for one in ends), strict=True)):
        if noise is not None and noise.is_left_out(index):
            continue
        trained = Compared(*tensors)
        if noise is not None:
            trained = trained._replace(mask=noise.masks[index], num_masked=noise.counts[index])
        states = _states(*(one.state[index] for one in ends))
        found += [(1 + index, one) for one in (trained, *states)]
    return found


def _lost(wanted: Outcome, got: Outcome) -> list[bool]:
    """For each parameter, whether it is no number any more where the reference is: no rounding does that."""
    pairs = zip(_are_finite(wanted.parameters), _are_finite(got.parameters), strict=True)
    return [was_finite and not is_finite for was_finite, is_finite in pairs]


def _are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    found = at_once({n: one.isfinite().all().view(1) for n, one in enumerate(tensors)})
    return [found[number] == [True] for number in range(len(tensors))]


def difference(
    ends: Ends, noise: Noise | None, tolerance: float, *, moves: Sequence[float] | None = None
) -> float:
    """The largest difference, as it is or in units in which `tolerance` is what rounding allows.

    Args:
        ends: Of both ways.
        noise: Elements to leave out.
        tolerance: The unit, where there is noise.
        moves: What some runs that are rounded otherwise have of `in_units`, the largest of them. Where they
            are given, one parameter in `OUTLIERS` counts less by `OUTLIER_FACTOR`, and so do the loss and
            parameters of few elements, up to `FEW_FACTOR` times their move.

    Returns:
        Infinity where something is no number.
    """
    found = in_units(ends, noise, tolerance)
    if moves is None:
        return max(found)
    sizes = [1, *(parameter.numel() for parameter in ends.wanted.parameters)]
    loss, *others = (
        one / OUTLIER_FACTOR if size < FEW and one <= FEW_FACTOR * move else one
        for one, size, move in zip(found, sizes, moves, strict=True)
    )
    others.sort(reverse=True)
    spared = len(others) // OUTLIERS
    return max(loss, *others[spared:], *(one / OUTLIER_FACTOR for one in others[:spared]))


def in_units(ends: Ends, noise: Noise | None, tolerance: float) -> list[float]:
    """`differences` in units in which `tolerance` is what rounding allows; infinity for what is no number."""
    found = [math.inf if math.isnan(value) else value for value in differences(ends, noise)]
    if noise is None:
        return found
    return [v * tolerance / most for v, most in zip(found, _limits(noise, tolerance), strict=True)]


def _limits(noise: Noise, tolerance: float) -> list[float]:
    """What each of `differences` may be."""
    return [max(tolerance, SENSITIVITY_FACTOR * min(move, MOST_MOVED)) for move in noise.moves]


def is_directed(ends: Ends, noise: Noise, tolerance: float) -> bool:
    """Whether of what differs by more than it may, anything leans to one side, as what is wrong does.

    Cost: Waits for the device once for each tensor that differs by more.
    """
    limits = _limits(noise, tolerance)
    found = differences(ends, noise)
    # `not v <= most`, since NaN is not above any limit, either.
    beyond = {i for i, (v, most) in enumerate(zip(found, limits, strict=True)) if not v <= most}
    if found[0] > MOST_LOSS or not all(math.isfinite(found[index]) for index in beyond):
        return True
    owned = _compared(ends, noise)
    suspects = [
        one
        for (owner, one), gap in zip(owned, relative_gaps([one for _, one in owned]), strict=True)
        if owner in beyond and gap > limits[owner]
    ]
    return any(alignment(one) > MOST_ALIGNED for one in suspects)


def written_apart(wanted: Outcome, got: Outcome) -> dict[str, float]:
    """The gap over the change of each tensor that a step wrote besides; NaN equals NaN.

    What is no module's counts where the reference wrote it. Never NaN itself: infinite where one is a number
    and the other is none.
    """
    found = {}
    names = [name for name, one in got.written.items() if not one.is_shown]
    for name in dict.fromkeys((*wanted.written, *names)):
        before = (wanted.written.get(name) or got.written[name]).before
        values = [(o.written[name].now if name in o.written else before) for o in (wanted, got)]
        found[name] = _values_apart(before, *values)
    return found


def _values_apart(before: Tensor, wanted: Tensor, got: Tensor) -> float:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return math.inf
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    mine, theirs = (real_parts(values.to(wide)) for values in (wanted, got))
    # Infinity less infinity is no number, although both agree.
    gap = torch.where((mine == theirs) | (mine.isnan() & theirs.isnan()), 0.0, mine - theirs)
    distance = float(gap.abs().norm())
    if not distance:
        return 0.0
    old = real_parts(before.to(wide)) if before.shape == wanted.shape else torch.zeros_like(mine)
    # From infinity, or no number, to a number: what is written is the change.
    change = torch.where(old.isfinite(), mine - old, mine)
    sizes = (torch.where(values.isfinite(), values, 0.0) for values in (change, mine))
    changed, whole = (float(values.abs().norm()) for values in sizes)
    size = max(changed, RESOLUTION * whole)
    return distance / size if size and math.isfinite(distance) else math.inf


def _states(before: list[Tensor], wanted: list[Tensor], got: list[Tensor]) -> list[Compared]:
    """An optimizer's tensors for a parameter, before its first step zeros; none where there are others.

    Adam's update is the same for gradients of twice the size, its state is not.
    """
    # `differences` has counted these as infinitely far apart already.
    if len(wanted) != len(got):
        return []
    begun = begun_state(before, wanted)
    return [Compared(*tensors) for tensors in zip(begun, wanted, got, strict=True)]


def begun_state(before: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """What an optimizer's tensors for a parameter were before a step: zeros where the step has made them."""
    return before if len(before) == len(wanted) else [*map(torch.zeros_like, wanted)]
