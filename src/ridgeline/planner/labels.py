"""Plans in a few words, the same in progress, notes, the terminal's tables and on the page."""

from ridgeline import units
from ridgeline.plan import Plan
from ridgeline.synchronisation import words_of


def label(plan: Plan) -> str:
    """A plan in a few words: what differs from a worker alone running eagerly."""
    return ", ".join(plan_words(plan).values())


def plan_words(plan: Plan) -> dict[str, str]:
    """Knob to what a reader should see of it; knobs at their plainest are left out."""
    workers = units.counted(plan.workers, "worker")
    if plan.threads:
        workers += f" x {units.counted(plan.threads, 'thread')}"
    words = {"workers": workers, "execution": plan.execution}
    if plan.precision != "as-is":
        words["precision"] = plan.precision
    if plan.memory_format != "as-is":
        words["memory"] = plan.memory_format
    if plan.optimizer != "as-is":
        words["optimizer"] = f"{plan.optimizer} optimizer"
    if plan.kernels != "default":
        words["kernels"] = f"{plan.kernels} kernels"
    if plan.random != "as-is":
        words["random"] = f"{plan.random} random"
    if plan.accumulate > 1:
        words["accumulation"] = f"{plan.accumulate} micro-batches"
    if plan.workers > 1:
        words |= words_of(plan.sync)
        # Equal sizes once: searched limits may be dozens.
        sizes = list(dict.fromkeys(units.num_bytes(size) for size in plan.sync.bucket_bytes))
        words["buckets"] = f"buckets {', '.join(sizes[:3])}{' ...' if len(sizes) > 3 else ''}"
    return words
