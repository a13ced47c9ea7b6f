"""The timings of a step's operators held against the user's own step, run as a whole where it will train.

A replay issues operators one by one, in a process of its own. What Python, autograd and the optimizer add is
known from small steps (`probe.host_costs`), which differ from the user's code, and hosts that others share
change their speed within seconds. So one eager step is timed in the process that will train, phase by phase,
and what operators cost is multiplied by what makes the model of that step as long as it was.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.machine import Machine, OperatorTiming, Setting
from ridgeline.plan import Plan
from ridgeline.simulator.model import StepModel, model_step
from ridgeline.workload import Phase, Workload

MOST = 2.0
"""A phase that takes more than this multiple, or its inverse, does something else than was traced."""
MOST_GENERAL = 4.0
"""The same where no operator was timed: what an operator costs the host in general is of a small network, and
an H200's host took 2.5 times as long for products and normalisations (torch 2.11)."""
FAR = {"cpu": 0.05, "cuda": 0.25}
"""Operators that miss a phase by less are left as they are: steps vary by as much.

Source: steps that the host of an H200 issues, timed again and again in one process: they differ by up to 20 %
from second to second where the host has its usual speed (`host_speed`)."""
LONG_S = 5.0
"""A step of more seconds is not made for this: trials, which every choice makes, measure as much."""
QUEUED = 0.8
"""A device that is busy for this share of what the host takes may have kept the host waiting for room in its
queue, so that the host's seconds are not its own."""
QUEUE_LENGTH = 1000
"""Kernels that the host can issue before the first has run.

Source: about 1024, found by issuing kernels behind a long one on an H200."""
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class Missed(NamedTuple):
    """A phase whose operators do not add up to it: `taken_s` against `told_s`, so `factor` times as much.

    `is_general`: none of them was timed, so that what any operator costs the host is corrected.
    """

    phase: Phase
    taken_s: float
    told_s: float
    factor: float
    is_general: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether its operators are scaled; what is too far off is something else."""
        most = MOST_GENERAL if self.is_general else MOST
        return 1.0 / most <= self.factor <= most

    def __str__(self) -> str:
        done = f"scaled by {self.factor:.2f}" if self.is_scaled else "too far off: left as they are"
        taken, told = units.seconds(self.taken_s), units.seconds(self.told_s)
        return f"{taken} in {self.phase} where its operators add up to {told} ({done})"


def is_long(machine: Machine, workload: Workload, setting: Setting) -> bool:
    """Whether a step of one worker, by what its operators add up to, takes too long to be made for this."""
    model = model_step(machine, workload, Plan(workers=1, threads=setting.threads), setting)
    return sum(p.lane_s for held in model.pieces.values() for p in held) > LONG_S


def held_against_step(
    machine: Machine, workload: Workload, setting: Setting, seconds: Mapping[str, float]
) -> Machine:
    """The machine with operators that add up to a real step, and a warning that names the phases they missed.

    On a CPU the seconds of operators are corrected, on a GPU what the host needs to issue them: what kernels
    take is known from whole passes. Where none was timed, it is what any operator costs the host. Operators
    that other precisions and memory formats have are corrected as the phase that they are in. A phase in
    which the host waits for values is left as it is.

    The setting is that of the workers that made their steps at once, each alone; `seconds` are the host's,
    for each phase of an eager step that begins with an idle device.
    """
    plan = Plan(workers=1, threads=setting.threads)  # nothing is sent
    model = model_step(machine, workload, plan, setting)
    on_gpu = workload.device == "cuda"
    if on_gpu and _may_queue(model, sum(seconds.values())):
        return machine
    timed = {t.key for t in machine.timings if t.setting == setting and (t.issue or not on_gpu)}
    keys = {index for index, op in enumerate(workload.ops) if op.key in timed}
    found = [
        _missed(model, phase, seconds.get(phase, 0.0), keys, on_gpu=on_gpu) for phase in PHASES
    ]
    missed = [each for each in found if each is not None]
    if not missed:
        return machine
    of_key = _by_key(workload, {m.phase: m.factor for m in missed if _corrects(m, general=False)})
    general = {m.phase: m.factor for m in missed if _corrects(m, general=True)}
    timings = tuple(
        _scaled(timing, of_key.get(timing.key, 1.0), on_gpu=on_gpu)
        if timing.setting == setting
        else timing
        for timing in machine.timings
    )
    dispatch = tuple(
        msgspec.structs.replace(entry, seconds=entry.seconds.times(general[entry.phase]))
        if entry.device == workload.device and entry.phase in general
        else entry
        for entry in machine.dispatch
    )
    said = f"the host takes for a whole step of {workload.name} {', '.join(map(str, missed))}"
    warnings = (*machine.warnings, said)
    return msgspec.structs.replace(machine, timings=timings, dispatch=dispatch, warnings=warnings)


def _corrects(missed: Missed, *, general: bool) -> bool:
    return missed.is_scaled and missed.is_general == general


def _may_queue(model: StepModel, taken_s: float) -> bool:
    """Whether the host may have waited for the device to make room."""
    kernels_s = [p.lane_s for held in model.pieces.values() for p in held if p.has_kernel]
    return len(kernels_s) > QUEUE_LENGTH and sum(kernels_s) > QUEUED * taken_s


def _missed(
    model: StepModel, phase: Phase, taken_s: float, timed: Collection[int], *, on_gpu: bool
) -> Missed | None:
    """By how much the operators of a phase miss it; None where they are to be left as they are."""
    pieces = model.pieces.get(phase, ())
    costs = [(p.host_s if on_gpu else p.lane_s, p.op in timed) for p in pieces]
    told_s = sum(cost for cost, _ in costs)
    timed_s = sum(cost for cost, is_timed in costs if is_timed)
    is_near = abs(taken_s - told_s) < FAR["cuda" if on_gpu else "cpu"] * told_s
    if not told_s or not taken_s or is_near or (on_gpu and any(p.waits for p in pieces)):
        return None
    if timed_s:
        return Missed(phase, taken_s, told_s, (taken_s - (told_s - timed_s)) / timed_s)
    # On a CPU operators have no cost apart from their seconds, for which there are rates only.
    return Missed(phase, taken_s, told_s, taken_s / told_s, is_general=True) if on_gpu else None


def _by_key(workload: Workload, factors: Mapping[Phase, float]) -> dict[str, float]:
    """The factor of each operator; of one that several phases have, their mean over its calls."""
    found: dict[str, list[float]] = defaultdict(list)
    for load in (workload, *workload.variants):
        for op in load.ops:
            found[op.key].append(factors.get(op.phase, 1.0))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _scaled(timing: OperatorTiming, factor: float, *, on_gpu: bool) -> OperatorTiming:
    if not on_gpu:
        return msgspec.structs.replace(timing, seconds=timing.seconds.times(factor))
    if timing.issue is None:
        return timing
    return msgspec.structs.replace(timing, issue=timing.issue.times(factor))
