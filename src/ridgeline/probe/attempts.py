"""A survey that survives its operators: what ends the processes is left out, and they start again."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from signal import SIGKILL

import msgspec

from ridgeline.machine import Setting
from ridgeline.probe.findings import BY_SETTING, Findings, Request, TraceKey
from ridgeline.probe.groups.group import Group, WorkerError, run_in_group
from ridgeline.probe.groups.journal import (
    DIRECTORY,
    HANG_S,
    OperatorEntry,
    Reader,
    fault_path,
    partial_path,
)
from ridgeline.workload import Workload

SURVEY = "ridgeline.probe.survey:survey"
MOST_FAULTS = 5
"""Operators that may end the measuring processes before the others are given up: each costs a new start."""


def survey_in_group(
    request: Request,
    setting: Setting,
    *,
    deadline_s: float,
    first_gpu: int = 0,
    environment: Mapping[str, str] | None = None,
    group: Group | None = None,
) -> Findings:
    """The findings of a group of fresh processes of a setting; other arguments as of `run_in_group`.

    Where an operator of the workload ends a process (an assertion in a kernel, a signal), hangs or exhausts
    the memory, a warning says so, what was found before is kept, and the rest is measured without it. Where
    the deadline ends them, what was found before is kept, and a warning says what is missing.

    Raises:
        LaunchError: the processes ended in something else than an operator, or before anything was found.

    Cost: Each start takes seconds: interpreters, torch, a GPU's context.
    """
    found, load = Findings(), request.workload
    limit = time.monotonic() + deadline_s
    for _ in range(MOST_FAULTS):
        # A directory for each start: the journal of the one before would name its culprit again.
        with tempfile.TemporaryDirectory(prefix="ridgeline-survey-") as name:
            directory = Path(name)
            reader = Reader(directory)
            try:
                reply = run_in_group(
                    SURVEY,
                    msgspec.json.encode(request),
                    workers=setting.workers,
                    threads=setting.threads,
                    device=setting.device,
                    deadline_s=max(1.0, limit - time.monotonic()),
                    first_gpu=first_gpu,
                    environment={DIRECTORY: name} | dict(environment or {}),
                    hanging=lambda reader=reader: reader.hanging(setting.workers, after_s=HANG_S),
                    group=group,
                )
                return found + msgspec.json.decode(reply, type=Findings)
            except WorkerError as error:
                # A rank that failed for a lost peer may be in no operator; another one then is.
                entry = reader.entry(error.rank) or reader.any_entry(setting.workers)
                done = _partial(directory)
                # A late group that has found something has only measured less, which is no failure.
                if error.is_late and found + done != Findings():
                    return found + done + Findings(warnings=_unmeasured(request, done, error.how))
                if entry is None or request.workload is None:
                    raise
                found += done
                fault = fault_path(directory, error.rank)
                # Written by the worker before it died, so it says more than its exit code.
                reason = fault.read_text() if fault.exists() else error.how
        load, key = _culprit(request.workload, entry)
        # Memory stays short whichever operator is left out next.
        if error_is_lack_of_memory(reason) or time.monotonic() > limit:
            return found + Findings(warnings=(_given_up(load, reason),))
        found += Findings(warnings=(f"operator {key} could not be timed: {reason}",))
        request = remainder(request, done, key)
    return found + Findings(
        warnings=(_given_up(load, f"{MOST_FAULTS} of them ended the measuring process"),)
    )


def error_is_lack_of_memory(how: str) -> bool:
    """Whether a process ended as those do that the system ends for want of memory."""
    return f"signal {int(SIGKILL)} " in how


def remainder(request: Request, done: Findings, key: str) -> Request:
    """What of a request is left to measure after `done`, without the operator `key`."""
    return msgspec.structs.replace(
        request,
        **{name: _left(request, done, name) for name in BY_SETTING},
        dispatch=request.dispatch and not done.dispatch,
        links=request.links and not done.links,
        skip=(*request.skip, key),
        timed=(*request.timed, *_checked(done)),
    )


def _left(request: Request, done: Findings, name: str) -> tuple[Setting, ...]:
    """The settings of one of `BY_SETTING` that nothing was found at."""
    found = {entry.setting for entry in getattr(done, name)}
    return tuple(setting for setting in getattr(request, name) if setting not in found)


def _checked(done: Findings) -> tuple[TraceKey, ...]:
    return tuple((check.setting, check.precision, check.memory_format) for check in done.checks)


def _unmeasured(request: Request, done: Findings, how: str) -> tuple[str, ...]:
    """What a group that was ended for being late did not come to, a line each."""
    known = (*request.timed, *_checked(done))
    lines = [
        f"operators of {load.name} ({load.precision}, {load.memory_format} memory) were not timed at "
        f"{setting}: measuring had {how}"
        for setting in request.timings
        for load in request.traces
        if (setting, load.precision, load.memory_format) not in known
    ]
    lines += [
        f"{what} of {setting} were not measured: measuring had {how}"
        for what, name in zip(("rates", "collectives", "compressions"), BY_SETTING, strict=True)
        for setting in _left(request, done, name)
    ]
    alone = (("dispatch", request.dispatch, done.dispatch), ("links", request.links, done.links))
    lines += [
        f"{what} of this machine: not measured, as measuring had {how}"
        for what, is_wanted, found in alone
        if is_wanted and not found
    ]
    return tuple(lines)


def _partial(directory: Path) -> Findings:
    """What rank 0 had found before."""
    path = partial_path(directory)
    return msgspec.json.decode(path.read_bytes(), type=Findings) if path.exists() else Findings()


def _culprit(workload: Workload, entry: OperatorEntry) -> tuple[Workload, str]:
    """The trace and the key of the op that a journal names."""
    load = (workload, *workload.variants)[entry.variant]
    return load, load.ops[entry.op].key


def _given_up(workload: Workload | None, reason: str) -> str:
    assert workload is not None
    return (
        f"operators of {workload.name} ({workload.precision}) were not timed: {reason}; their time is "
        "estimated from others of their kind"
    )
