"""The check of a step's timings: what its ops take one by one, against what it takes as a whole."""

import statistics
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from ridgeline import units
from ridgeline.machine import Quantity, Setting, StepCheck
from ridgeline.probe.operators.clock import Passes
from ridgeline.workload import Workload

MOST_TAIL = 1.25
"""Delays beyond this share are not the machine's own: it was busy with something else."""
CLOSE = 0.02
"""Timings that add up to within this share of a whole pass are left as they are."""
FAR = 0.05
"""From this share on, a warning names the families that the timings miss."""


def check_step(
    workload: Workload, setting: Setting, passes: Passes, medians: Mapping[int, float]
) -> StepCheck:
    """What the timings of one step add up to, and what whole passes took.

    `medians` are seconds of each op by index.
    """
    totals = [sum(stretch.seconds for stretch in whole) for whole in passes.whole]
    if setting.device == "cpu":  # there marks cost nothing, so each pass is a whole one
        totals += [sum(taken.values()) for taken in passes.ops if len(taken) == len(medians)]
    ops_s = sum(medians.values())
    # Of a single pass nobody knows whether it was disturbed.
    whole = Quantity.measured(totals, "s") if len(totals) >= 2 else None
    check = StepCheck(
        setting=setting,
        workload=workload.name,
        precision=workload.precision,
        memory_format=workload.memory_format,
        ops_s=ops_s,
        whole=whole,
        untimed=len(workload.ops) - len(medians),
    )
    if check.ratio is None or abs(check.ratio - 1.0) < FAR:
        return check
    return msgspec.structs.replace(check, missed=_missed(workload, passes, medians))


def correction(check: StepCheck) -> float:
    """What to multiply timings with so that they add up to the whole step.

    The median of an op leaves out rare delays (interrupts, other programs, pages that the system takes
    back), but a step of hundreds of ops meets some of them every time; on a GPU kernels that follow each
    other run into one another, which no mark between them sees. There a whole pass that is longer than its
    ops waits for the host between short kernels, which a replayed graph does not; of an eager step the
    simulated host accounts for it.
    """
    if check.ratio is None or abs(check.ratio - 1.0) <= CLOSE:
        return 1.0
    if check.setting.device == "cuda" and check.ratio < 1.0:
        return 1.0
    # Beyond the limit the machine was busy: no factor makes such timings right.
    return min(max(1.0 / MOST_TAIL, 1.0 / check.ratio), MOST_TAIL)


def warning(check: StepCheck) -> str | None:
    """What to say where the timings do not add up; None where they do."""
    if check.ratio is None or check.whole is None or abs(check.ratio - 1.0) < FAR:
        return None
    families = f", mostly in {', '.join(check.missed)}" if check.missed else ""
    factor = correction(check)
    scaled = f"were scaled by {factor:.3f}" if factor != 1.0 else "were left as they are"
    return (
        f"the operators of {check.workload} ({check.precision}) at {check.setting} take "
        f"{units.seconds(check.ops_s)} one by one and {units.seconds(check.whole.value)} in a whole "
        f"pass{families}: their timings {scaled}"
    )


def _missed(workload: Workload, passes: Passes, medians: Mapping[int, float]) -> tuple[str, ...]:
    """The families whose ops stand where stretches take another time than their ops, largest first."""
    found: dict[str, float] = defaultdict(float)
    for stretches in zip(*passes.whole, strict=False):
        first, end, _ = stretches[0]
        mine = {index: medians[index] for index in range(first, end) if index in medians}
        total = sum(mine.values())
        if total <= 0.0:
            continue
        off = statistics.median(stretch.seconds for stretch in stretches) - total
        for index, seconds in mine.items():
            found[workload.ops[index].family] += off * seconds / total
    most = max((abs(off) for off in found.values()), default=0.0)
    ordered = sorted(found, key=lambda family: -abs(found[family]))
    return tuple(family for family in ordered if abs(found[family]) > 0.25 * most)
