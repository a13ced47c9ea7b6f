"""What of a profile is missing for a step, and the profile with what was found: both without measuring."""

from collections.abc import Sequence

import msgspec

from ridgeline.machine import Ceiling, CodecTiming, Collective, Machine, Setting
from ridgeline.probe.findings import BY_SETTING, Findings, Request
from ridgeline.probe.rates.doubts import doubts
from ridgeline.probe.rates.links import every_link
from ridgeline.workload import Workload

MOST_TIMINGS = 20_000
"""Operator timings kept in the cache; the oldest go first."""
MOST_CHECKS = 200


def requests(
    machine: Machine,
    wanted: Sequence[Setting],
    *,
    quick: bool,
    workload: Workload | None,
    codecs: bool = True,
) -> tuple[Request, ...]:
    """What is missing in `machine` for `wanted` and `workload`, one request for each kind of device.

    Of a full measurement, which takes minutes, one for each setting: each is kept before the next begins.

    The other arguments are those of `measure`.
    """
    found: list[Request] = []
    for device in ("cpu", "cuda"):
        mine = [setting for setting in wanted if setting.device == device]
        # A GPU serves one worker, so rates and timings do not depend on how many there are.
        rated = mine if device == "cpu" or not mine else [Setting(device="cuda", workers=1)]
        joined = [setting for setting in mine if setting.workers > 1]
        has_dispatch = any(entry.device == device for entry in machine.dispatch)
        request = Request(
            quick=quick,
            ceilings=_without(rated, machine.ceilings),
            collectives=_without(joined, machine.collectives),
            codecs=_without(joined if codecs and device == "cpu" else [], machine.codecs),
            timings=tuple(s for s in rated if workload and _has_untimed(machine, s, workload)),
            dispatch=bool(mine) and not has_dispatch,
            links=device == "cuda" and bool(mine) and _has_unmeasured_link(machine),
        )
        if request.timings:
            # Without timings no operators travel to the workers: a workload is its largest part.
            request = msgspec.structs.replace(request, workload=workload)
            request = msgspec.structs.replace(request, skip=_faulty(machine, request))
        if request.settings:
            found += [request] if quick else parts(request)
    return tuple(found)


def parts(request: Request) -> list[Request]:
    """One request for each setting; what belongs to none is in the first."""
    return [
        msgspec.structs.replace(
            request,
            **{
                name: (setting,) * (setting in getattr(request, name))
                for name in (*BY_SETTING, "timings")
            },
            dispatch=request.dispatch and not number,
            links=request.links and not number,
        )
        for number, setting in enumerate(request.settings)
    ]


def merge(machine: Machine, findings: Findings) -> Machine:
    """The machine with the findings added and doubted; what was measured again replaces the old."""
    links = {link.ends: link for link in (*machine.links, *findings.links)}
    # The new ones stand behind, so that the oldest are the first to be dropped.
    fresh = {(entry.setting, entry.key) for entry in findings.timings}
    timings = [e for e in machine.timings if (e.setting, e.key) not in fresh]
    ceilings = machine.ceilings + findings.ceilings
    checks = {
        (check.setting, check.workload, check.precision, check.memory_format): check
        for check in (*machine.checks, *findings.checks)
    }
    warnings = (*machine.warnings, *findings.warnings, *doubts(ceilings))
    return msgspec.structs.replace(
        machine,
        ceilings=ceilings,
        dispatch=machine.dispatch + findings.dispatch,
        collectives=machine.collectives + findings.collectives,
        links=tuple(links.values()),
        overlaps=machine.overlaps + findings.overlaps,
        codecs=machine.codecs + findings.codecs,
        timings=(*timings, *findings.timings)[-MOST_TIMINGS:],
        checks=tuple(checks.values())[-MOST_CHECKS:],
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _without(
    wanted: Sequence[Setting], measured: Sequence[Ceiling | Collective | CodecTiming]
) -> tuple[Setting, ...]:
    known = {entry.setting for entry in measured}
    return tuple(setting for setting in wanted if setting not in known)


def _has_unmeasured_link(machine: Machine) -> bool:
    """Whether a link between the host and the GPUs, or between two of them, is not in the profile."""
    known = {(link.direction, link.source, link.target) for link in machine.links if link.table}
    return any(name not in known for name in every_link(max(1, machine.num_gpus)))


def _has_untimed(machine: Machine, setting: Setting, workload: Workload) -> bool:
    """Whether an op of the workload was neither timed nor found to be impossible to issue."""
    timed = {entry.key for entry in machine.timings if entry.setting == setting}
    # Keys are digests, so a text that holds one speaks of that operator.
    told = "\n".join(machine.warnings)
    return any(
        op.key not in timed and op.key not in told
        for load in (workload, *workload.variants)
        for op in load.ops
        # On a GPU a view takes no time of the device, and its issue is that of any operator.
        if op.family != "view" or setting.device == "cpu"
    )


def _faulty(machine: Machine, request: Request) -> tuple[str, ...]:
    """Operators that a warning names: issued again they would fail again, or end the process again."""
    told = "\n".join(machine.warnings)
    keys = dict.fromkeys(op.key for load in request.traces for op in load.ops)
    return tuple(key for key in keys if key in told)
