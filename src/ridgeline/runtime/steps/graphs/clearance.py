"""Clearance for a capture: what must be known of a step before it is captured for the first time."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.execution import MODES
from ridgeline.guards.model_guard import check_scripted
from ridgeline.lint.child_trial import check_trial, try_step_in_child
from ridgeline.lint.child_worker import is_trial
from ridgeline.lint.idle_draws import IdleDraw
from ridgeline.lint.lint import (
    FROM_HOST,
    Doubt,
    Finding,
    Lint,
    check_capturable,
    inspect_step,
    is_doubtful,
)
from ridgeline.optimizer_forms import has_step_of_torch
from ridgeline.optimizers.groups import parameters_of
from ridgeline.reach.side_effects import refuse_streams
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.whole_step.reads import StepReads
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World

OUTSIDE_LIMIT_S = 120.0
"""Of a child that captures a step without its optimizer: a start takes seconds, compiling longer."""
_CLEARED: set[type] = set()
"""Classes of optimizers that stepped beside a graph in a child of this process."""


class Clearance(NamedTuple):
    """What looking at a step that can be captured has found.

    Attributes:
        idle_draws: Random numbers to draw on the host beside each replay, as the step as written does.
        has_doubts: Whether looking left something to a trial.
    """

    idle_draws: tuple[IdleDraw, ...] = ()
    has_doubts: bool = False


def clear_for_capture(body: StepBody, batch: Any, world: World, notes: list[str]) -> Clearance:
    """Look for what cannot be captured, and try in a child process what looking cannot judge.

    A failed capture can leave the device unusable, so neither happens in this process.

    Args:
        body: The step; nothing was compiled yet.
        batch: An example, on the device.
        world: If one worker's step cannot be captured, none continues.
        notes: Receives how a doubt was settled.

    Raises:
        CaptureError: names each operator and line that cannot be captured, or what the child met.
        SideEffectError: the step draws from an iterator, so that it cannot be run on trial.

    Cost: Two steps, undone; a doubt starts a process, which takes seconds.
    """
    check_gradient_hooks(body)
    refuse_streams(body.model, body.loss_fn, body.optimizer, batch)
    lint = inspect_step(body, batch, device=world.device)
    is_whole = MODES[body.plan.execution].form == "compiled"
    if is_whole:
        lint = _without_constants(_with_checkpoints_doubted(lint), body, batch, world)
    dynamic = [one for one in lint.findings if one.rule == "dynamic-shape"]
    body.findings.value_shapes[:] = [f"{one.op} at {one.line}" for one in dynamic]
    # Before anybody raises: workers that go on would wait in this exchange for one that left.
    is_refused = largest_of_workers(float(bool(lint.findings)), world)
    check_capturable(lint.findings, is_compiled=is_whole)
    if is_refused:
        raise CaptureError(
            "wanted a step that all workers can capture, got one that another worker cannot; its message "
            "names operators and lines"
        )
    found = Clearance(lint.idle_draws, has_doubts=bool(lint.doubts))
    if lint.optimizer:
        _clear_optimizer(body, batch, world, lint.optimizer, notes)
    if not is_doubtful(lint):
        return found
    if world.size == 1:
        notes.append(check_trial(try_step_in_child(body, batch, body.plan), lint.doubts))
        return found
    doubts = "; ".join(str(doubt) for doubt in lint.doubts)
    notes.append(f"captured without a trial, since there are {world.size} workers: {doubts}")
    return found


def _with_checkpoints_doubted(lint: Lint) -> Lint:
    """Activation checkpoints as doubts: what the compiler makes of them asks for no random state, or does.

    Source: torch 2.11 and 2.13 keep seeds of the compiler's own random numbers from forward to backward pass,
    and put generators of their own in the place of a state that eager's numbers come from.
    """
    found = [one for one in lint.findings if one.rule == "checkpoint"]
    if found:
        # They hold their graph in a cycle, and with it nodes that add gradients up on the stream of this run:
        # on that of a capture they would be found again, and waited for.
        gc.collect()
    return lint._replace(
        findings=tuple(one for one in lint.findings if one.rule != "checkpoint"),
        doubts=(*lint.doubts, *(Doubt("an activation checkpoint", one.line) for one in found)),
    )


def _without_constants(lint: Lint, body: StepBody, batch: Any, world: World) -> Lint:
    """Without what a compiled step copies from the host, where the compiler may make that on the device.

    What its code makes there of Python numbers alone is the same in every replay: guards see other numbers,
    and what torch cannot copy in a capture it refuses before it calls the device. A tensor that the step
    finds there may hold other values later, which no replay would see.

    Cost: Reads the step where there is such a copy; what was read serves the capture.
    """
    if not lint.findings or any(one.rule not in FROM_HOST for one in lint.findings):
        return lint
    try:
        reads = StepReads(body, batch, world.device.type, is_lifted=False)
    except CaptureError:
        return lint
    return lint if reads.takes_host else lint._replace(findings=())


def check_gradient_hooks(body: StepBody) -> None:
    """Refuse hooks on gradients of the user's own: what they read in Python is not compared.

    Raises:
        ObstacleError: names a parameter with one, or a module, see `check_scripted`.
    """
    check_scripted(body.model)
    named = {parameter: name for name, parameter in body.model.named_parameters()}
    held = parameters_of(body.optimizer)
    for parameter in (*named, *held):  # the loss may have some of its own
        name = named.get(parameter, "a parameter outside of the model")
        accumulated = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - nothing public lists them
        if parameter._backward_hooks or (accumulated and body.synchronizer is None):  # noqa: SLF001
            raise ObstacleError(
                "wanted parameters without hooks on their gradients, since replays of a graph would not "
                f"notice changes of what these read, got one on {name!r}; remove it, or use "
                "execution='compiled' or 'eager'"
            )


def _clear_optimizer(
    body: StepBody, batch: Any, world: World, why: Sequence[Finding], notes: list[str]
) -> None:
    """Try a graph beside which the optimizer steps in a child process, once for each class of optimizers.

    What an optimizer of the user's own does to the gradients that a graph writes is not known before. Those
    of torch only read them, and need no trial.
    """
    kind = type(body.optimizer)
    # A child process has no group in which its step could meet the other workers.
    if world.size > 1:
        check_capturable(why)
    if has_step_of_torch(body.optimizer) or is_trial() or kind in _CLEARED:
        return
    outcome = try_step_in_child(body, batch, body.plan, limit_s=OUTSIDE_LIMIT_S)
    if outcome.status != "ok":
        raise ObstacleError(
            f"wanted an optimizer that can step beside a CUDA graph, got {kind.__name__}, which "
            f"{outcome}; use execution='eager' or another optimizer"
        )
    _CLEARED.add(kind)
    notes.append(f"a graph beside the optimizer {kind.__name__} {outcome}")
