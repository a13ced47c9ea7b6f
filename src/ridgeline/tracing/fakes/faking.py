"""A step traced on fake tensors: nothing is computed, and nothing of the user's is touched."""

from typing import NamedTuple

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ridgeline.capture.interception import scripted_as_written
from ridgeline.errors import OutOfTimeError, SideEffectError, WorkloadError
from ridgeline.reach.undo import Undo
from ridgeline.tracing.described import recorded_workload
from ridgeline.tracing.fakes.leaks import (
    all_objects_shown,
    are_out_of_reach,
    expel,
    left_fakes,
    older_objects_set_aside,
    refuse_left,
)
from ridgeline.tracing.fakes.twin import channels_last, make_twin
from ridgeline.tracing.recorded_step import Step
from ridgeline.tracing.recording import record_step
from ridgeline.tracing.refusal import obstacle
from ridgeline.workload import Workload

KEPT = (
    "the step keeps tensors that it makes outside of the model (a cache that is filled once), so that what "
    "was traced is its first call"
)
"""Said of a step that left fake tensors in the user's objects; they were taken out again."""


class Attempt(NamedTuple):
    """What came of a trace: a workload, and why it may not be that of every step, or an error."""

    workload: Workload | None
    doubt: str
    error: Exception | None = None


def fake_workload(step: Step, name: str, *, may_fail: bool) -> Attempt:
    """The workload of a step that is not run, as far as it can be had.

    Where it `may_fail`, what the user's code raises on fake tensors is returned, and not raised.

    Raises:
        WorkloadError: what the step keeps cannot be taken back.
        OutOfTimeError: of the step's `check`.
        Exception: see `may_fail`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    roots = (step.model, step.loss_fn, step.optimizer, step.batch)
    # Without values: on fake tensors nothing is computed, and a copy of the state would take its memory.
    before = Undo(*roots, values=False, arrays=True)
    try:
        with older_objects_set_aside():
            attempt = _attempt(step, name, mode, may_fail=may_fail)
            # Where the caller is inside of autocast, it keeps casts of the weights until the end of that.
            torch.clear_autocast_cache()
            is_kept = bool(left_fakes(mode))
    finally:
        before.restore()
    if not is_kept:
        return attempt
    with all_objects_shown():
        # Asked again each time, and not kept: a list of them would be one more holder.
        if are_out_of_reach(left_fakes(mode)):
            return attempt
        expel(left_fakes(mode))
        refuse_left(left_fakes(mode))
    if attempt.workload is None:
        return attempt
    notes = (*attempt.workload.notes, KEPT)
    return Attempt(msgspec.structs.replace(attempt.workload, notes=notes), KEPT)


def _attempt(step: Step, name: str, mode: FakeTensorMode, *, may_fail: bool) -> Attempt:
    try:
        return _workload(step, name, mode)
    except (OutOfTimeError, SideEffectError):
        raise
    except Exception as error:
        if not may_fail and not isinstance(error, WorkloadError):
            raise
        reason = obstacle(error)
        _without_frames(error)
        return Attempt(None, reason, error)


def _without_frames(error: BaseException | None) -> None:
    """Frames hold fake tensors, which would look like kept ones; of all errors that led to this one."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        one.__traceback__ = None
        waiting += [one.__cause__, one.__context__]


def _workload(step: Step, name: str, mode: FakeTensorMode) -> Attempt:
    with scripted_as_written():
        twin = make_twin(step.model, step.optimizer, step.batch, mode)
        if step.memory_format == "channels_last":
            twin = channels_last(twin)
        run = record_step(twin, step)
    workload = recorded_workload(step, name, run)
    return Attempt(workload, run.notes[0] if run.is_estimated else "")
