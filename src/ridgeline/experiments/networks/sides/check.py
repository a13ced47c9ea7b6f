"""Whether `auto` trains as the plain loop does: ten steps of both in float32, from the same random state."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.experiments.networks.request import NetworkAnswer, NetworkRequest, Write
from ridgeline.experiments.networks.result import Check
from ridgeline.experiments.networks.sides.forms import NetworkSubject, plain_step
from ridgeline.experiments.networks.sides.ours import Ours, notes_of
from ridgeline.experiments.ways.contest import known
from ridgeline.workers.agree import largest_of_workers

STEPS = 10
TOLERANCES = {"cpu": 1e-6, "cuda": 1e-3}
"""Largest relative difference by device. On a GPU sums have no fixed order (atomics, other kernels), and ten
steps multiply what that does to the last bit."""
LAST_BIT = 2.0**-22
SENSITIVITY_FACTOR = 4.0
"""A step may differ by this multiple of what the parameters' last bits do to the plain loop itself."""
SEED = 1234


class TrainedSteps(NamedTuple):
    """What some steps came to."""

    losses: list[float]
    parameters: list[Tensor]


def check(request: NetworkRequest, subject: NetworkSubject, write: Write) -> None:
    """Train ten steps in both ways and compare."""
    _without_tf32()
    plain, batch = plain_step(subject, is_compiled=False, is_channels_last=False)
    wanted = train(lambda: plain(batch), plain.model, subject)
    nudged, batch = plain_step(subject, is_compiled=False, is_channels_last=False)
    with torch.no_grad():
        for parameter in nudged.model.parameters():
            # Two units in the last place, so that every value really changes.
            parameter.mul_(1.0 + LAST_BIT)
    other = train(lambda: nudged(batch), nudged.model, subject)
    # Nothing is allowed to it that changes the maths.
    ours = Ours(subject, request.how)
    plan = ours.prepare()
    got = train(lambda: ours.step(ours.batch), ours.step.model, subject)
    losses, parameters = differences(got, wanted)
    sensitivity = max(differences(other, wanted))
    # The worst of all workers: each trains on other data, and one verdict holds for all.
    losses, parameters, sensitivity = (
        largest_of_workers(one, subject.world) for one in (losses, parameters, sensitivity)
    )
    tolerance = TOLERANCES[subject.world.kind]
    found = Check(
        plan=repr(plan),
        execution=plan.execution,
        losses=losses,
        parameters=parameters,
        sensitivity=sensitivity,
        tolerance=tolerance,
        is_equal=is_close(losses, parameters, sensitivity, tolerance),
        is_exact=losses == parameters == 0.0,
    )
    write(NetworkAnswer(check=found, notes=notes_of(ours.step)))
    ours.step.close()


def train(step: Callable[[], Any], model: nn.Module, subject: NetworkSubject) -> TrainedSteps:
    """Losses of ten steps from a seed of this worker, and the parameters after them."""
    torch.manual_seed(SEED + subject.world.rank)
    # What a step returns may be overwritten by the next one.
    losses = [float(step().detach()) for _ in range(STEPS)]
    return TrainedSteps(losses, [p.detach().clone() for p in model.parameters()])


def differences(got: TrainedSteps, wanted: TrainedSteps) -> tuple[float, float]:
    """Largest relative difference of a loss, and that of the parameters: norm of the gap over the norm."""
    losses = max(
        abs(a - b) / max(abs(b), 1e-12) for a, b in zip(got.losses, wanted.losses, strict=True)
    )
    gap = _squares([a - b for a, b in zip(got.parameters, wanted.parameters, strict=True)])
    size = _squares(wanted.parameters)
    parameters = math.sqrt(gap / size) if size else math.sqrt(gap)
    return known(losses), known(parameters)


def is_close(losses: float, parameters: float, sensitivity: float, tolerance: float) -> bool:
    """Whether differences are within the tolerance, or within what the last bits do by themselves."""
    return max(losses, parameters) <= max(tolerance, SENSITIVITY_FACTOR * sensitivity)


def _squares(tensors: list[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def _without_tf32() -> None:
    """Full float32 for convolutions, and kernels that repeat themselves, in both ways."""
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
