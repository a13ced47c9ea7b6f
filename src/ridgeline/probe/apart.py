"""Operator timings for a process group that trains: taken in processes of their own, beside it.

A kernel that asserts would take a worker with it that is about to train, and the group with that. So the
first worker starts processes for it, as many as there are workers on its host, while the others wait.
"""

import os

import msgspec
import torch

from ridgeline.errors import LaunchError
from ridgeline.execution import waiting_as_here
from ridgeline.machine import Setting
from ridgeline.probe.attempts import survey_in_group
from ridgeline.probe.findings import BY_SETTING, Findings, Request
from ridgeline.probe.groups.worker_error import in_one_line

DEADLINE_S = 240.0
"""The other workers wait in a collective meanwhile, which NCCL by default ends after 10 minutes."""


def without_timings(request: Request) -> tuple[Request | None, Request | None]:
    """A request without its operator timings, and one with only those; None for an empty one."""
    alone = msgspec.structs.replace(request, timings=(), workload=None)
    nothing = dict.fromkeys(BY_SETTING, ())
    apart = msgspec.structs.replace(request, **nothing, dispatch=False, links=False)
    has_rates = any(getattr(request, name) for name in (*BY_SETTING, "dispatch", "links"))
    return (alone if has_rates else None), (apart if request.timings else None)


def time_apart(request: Request, limit_s: float = DEADLINE_S) -> Findings:
    """Operator timings, measured by processes that this one starts on its host.

    On the CPU as many processes measure at once as workers train on this host. Whatever fails becomes a
    warning: training goes on.

    After `limit_s` seconds the processes of a setting are ended.

    Cost: Blocks until the processes are done, at most `DEADLINE_S`.
    """
    found = Findings()
    # Setting by setting: workers of the largest one would contend with those of a smaller.
    for setting in request.timings:
        here = _here(setting)
        asked = msgspec.structs.replace(request, timings=(here,))
        try:
            part = survey_in_group(
                asked,
                here,
                deadline_s=min(DEADLINE_S, limit_s),
                # The GPU of this worker, so that the timed device is one that will train.
                first_gpu=torch.cuda.current_device() if here.device == "cuda" else 0,
                environment=waiting_as_here(os.environ),
            )
        except LaunchError as error:
            name = "" if request.workload is None else f" of {request.workload.name}"
            why = f"operators{name} were not timed at {setting}: {in_one_line(error)}"
            part = Findings(warnings=(why,))
        found += _as_of(part, setting)
    return found


def _here(setting: Setting) -> Setting:
    """The part of a setting that is on this host."""
    # Without torchrun's variable all workers are taken to be on this host.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", setting.workers))
    return msgspec.structs.replace(setting, workers=max(1, min(setting.workers, local)))


def _as_of(found: Findings, setting: Setting) -> Findings:
    """The findings as those of the setting of all hosts."""
    replace = msgspec.structs.replace
    timings = tuple(replace(timing, setting=setting) for timing in found.timings)
    checks = tuple(replace(check, setting=setting) for check in found.checks)
    return replace(found, timings=timings, checks=checks)
