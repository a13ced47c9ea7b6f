"""Checking a replayed step against the eager one before it is used.

A capture that bakes in a constant trains wrongly and silently. So from one and the same state both run
several steps, while inputs and learning rate are changed between replays, and must agree.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import PlanError
from ridgeline.runtime.body import StepBody
from ridgeline.runtime.capturable import LearningRates
from ridgeline.runtime.recorder import HostClock, Recorder
from ridgeline.runtime.snapshot import Snapshot

LEARNING_RATE_FACTORS = (1.0, 0.5, 2.0)
TOLERANCE = 0.02
"""Largest accepted difference, relative to the size of the parameters' change. Kernels that add in
another order stay below 1e-3 of it; a baked-in learning rate or input is off by 0.5 and more."""


def check_replay(
    body: StepBody,
    recorder: Recorder,
    batch: Any,
    inputs: Sequence[Tensor],
    rates: LearningRates,
    replay: Callable[[], None],
    loss_of_replay: Callable[[], Tensor],
    stream: torch.cuda.Stream,
    notes: list[str],
) -> None:
    """Run both ways from the present state with perturbed inputs and learning rates, then go back.

    Args:
        body: The eager step.
        recorder: Left untouched.
        batch: The static batch, whose tensors are `inputs`.
        inputs: Rolled along the samples between replays; restored afterwards.
        rates: Scaled between replays; restored afterwards.
        replay: Replays the captured step.
        loss_of_replay: Its loss.
        stream: The capture stream, on which the eager step runs.
        notes: Receives the largest difference.

    Raises:
        PlanError: they differ by more than `TOLERANCE`.

    Cost: Six steps and three copies of parameters, buffers and optimizer state.
    """
    silent = Recorder(HostClock())
    originals = [tensor.clone() for tensor in inputs]
    start = Snapshot(body.model, body.optimizer)
    worst = 0.0
    for shift, factor in enumerate(LEARNING_RATE_FACTORS):
        for tensor, original in zip(inputs, originals, strict=True):
            tensor.copy_(original.roll(shift, 0) if original.dim() else original)
        before = _parameters(body)
        results = []
        for run in (lambda: _eager(body, batch, silent, stream), replay):
            start.restore(keep_settings=True)
            rates.scale(factor)
            loss = run()
            rates.scale(1.0 / factor)
            loss = loss_of_replay() if loss is None else loss
            results.append((float(loss), _parameters(body)))
        worst = max(worst, _difference(before, *results))
        start.restore(keep_settings=True)
    for tensor, original in zip(inputs, originals, strict=True):
        tensor.copy_(original)
    start.restore()
    if not worst <= TOLERANCE:
        raise PlanError(
            f"wanted the replayed step to equal the eager one within {TOLERANCE} of the update, got a "
            f"difference of {worst:.3g} over {len(LEARNING_RATE_FACTORS)} perturbed steps; something in the "
            "step is baked into the graph (a Python number, host randomness): use execution='eager'"
        )
    notes.append(
        f"replay equals the eager step within {worst:.1e} of the update "
        f"({len(LEARNING_RATE_FACTORS)} steps, inputs and learning rate perturbed)"
    )


def _eager(body: StepBody, batch: Any, recorder: Recorder, stream: torch.cuda.Stream) -> Tensor:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = body(batch, recorder)
    torch.cuda.current_stream().wait_stream(stream)
    return loss


def _parameters(body: StepBody) -> list[Tensor]:
    return [p.detach().clone() for p in body.model.parameters() if p.requires_grad]


def _difference(
    before: list[Tensor],
    eager: tuple[float, list[Tensor]],
    replayed: tuple[float, list[Tensor]],
) -> float:
    """Norm of the difference over the norm of the update, or the losses' relative difference."""
    change = sum(
        float((a - b).double().square().sum()) for a, b in zip(eager[1], before, strict=True)
    )
    gap = sum(
        float((a - b).double().square().sum()) for a, b in zip(eager[1], replayed[1], strict=True)
    )
    losses = abs(eager[0] - replayed[0]) / max(abs(eager[0]), 1e-12)
    update = (gap / change) ** 0.5 if change else gap**0.5
    return max(losses, update)
