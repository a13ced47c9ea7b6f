"""Plans, settings and hardware numbers in a few words, the same in the terminal and on the page."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.machine import Machine, Quantity, Setting
from ridgeline.plan import Plan


def plan_label(plan: Plan) -> str:
    """A plan in a few words."""
    return ", ".join(plan_words(plan).values())


def plan_words(plan: Plan) -> dict[str, str]:
    """Knob to what a reader should see of it; knobs at their plainest are left out."""
    sync = plan.sync
    workers = f"{plan.workers} worker{'s' if plan.workers > 1 else ''}"
    if plan.threads:
        workers += f" x {plan.threads} thread{'s' if plan.threads > 1 else ''}"
    words = {"workers": workers, "execution": plan.execution}
    if plan.precision != "as-is":
        words["precision"] = plan.precision
    if plan.accumulate > 1:
        words["accumulation"] = f"{plan.accumulate} micro-batches"
    if plan.workers > 1:
        if sync.algorithm != "all_reduce":
            words["algorithm"] = sync.algorithm
        if sync.compression != "none":
            words["compression"] = f"{sync.compression} gradients"
        sizes = list(dict.fromkeys(units.num_bytes(size) for size in sync.bucket_bytes))
        words["buckets"] = f"buckets {', '.join(sizes[:3])}{' ...' if len(sizes) > 3 else ''}"
        if sync.every > 1:
            words["interval"] = f"every {sync.every} steps"
    return words


def quantities_of(machine: Machine) -> list[tuple[str, str, Quantity]]:
    """(what, where, number) of everything in a profile but its size tables and operator timings."""
    found = [(f"{c.family} {c.dtype}", str(c.setting), c.rate) for c in machine.ceilings]
    found += [
        (f"{entry.phase.replace('_', ' ')} dispatch", entry.device, entry.seconds)
        for entry in machine.dispatch
    ]
    for overlap in machine.overlaps:
        where = str(overlap.setting)
        if overlap.kernel is not None:
            where += f", kernels of {units.seconds(overlap.kernel.value)}"
        found.append(("slowdown of computing while communicating", where, overlap.compute_slowdown))
        found.append(
            ("slowdown of communicating while computing", where, overlap.communication_slowdown)
        )
    return found


def at_work(setting: Setting) -> str:
    """What runs at a setting, to follow "while"."""
    if setting.device == "cuda":
        return f"{setting.workers} GPU{'s' if setting.workers > 1 else ''} run"
    workers = f"{setting.workers} worker{'s' if setting.workers > 1 else ''}"
    return f"{workers} of {setting.threads} thread{'s' if setting.threads > 1 else ''} run"


def settings_of(machine: Machine) -> Sequence[Setting]:
    """The settings that a profile describes, in the order in which they were measured."""
    return tuple(dict.fromkeys(ceiling.setting for ceiling in machine.ceilings))
