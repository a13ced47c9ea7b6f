"""Which measured setting stands in for one that was not measured."""

import math
from collections.abc import Collection

from ridgeline.machine import Setting


def nearest_setting(settings: Collection[Setting], wanted: Setting) -> Setting | None:
    """The setting of the same device that is most like `wanted`; None when there is none.

    On GPUs the number of workers is secondary; on the CPU workers and threads count as ratios.
    """
    like = [setting for setting in settings if setting.device == wanted.device]
    if not like:
        return None

    # Ratios, as one thread more matters to two and not to sixty; ties go to fewer workers.
    def distance(s: Setting) -> tuple[float, int, int]:
        workers = abs(math.log2(s.workers / wanted.workers))
        threads = abs(math.log2(max(s.threads, 1) / max(wanted.threads, 1)))
        return workers + threads, s.workers, s.threads

    return min(like, key=distance)


def resolve(
    settings: Collection[Setting], wanted: Setting, what: str
) -> tuple[Setting | None, str]:
    """The setting to read, and a note when it is not the wanted one (on GPUs every one serves)."""
    if wanted in settings:
        return wanted, ""
    nearest = nearest_setting(settings, wanted)
    # Each GPU serves one worker, so the rates of any number hold for all.
    if nearest is None or wanted.device == "cuda":
        return nearest, ""
    return nearest, f"{what} at {wanted} were not measured: assumed as at {nearest}"
