"""One trace of a step, which all workers take."""

from collections.abc import Callable

import msgspec

from ridgeline.errors import OutOfTimeError, SideEffectError
from ridgeline.workers.agree import largest_of_workers, share_bytes
from ridgeline.workers.world import World
from ridgeline.workload import Workload


def shared_trace(traced: Callable[[], Workload], world: World) -> Workload:
    """Worker 0's trace, on all workers; what ends that of one, such as time that is up, ends it on all."""
    stopped, mine = None, b""
    try:
        mine = msgspec.json.encode(traced())
    except (OutOfTimeError, SideEffectError) as error:
        stopped = error
    is_late = isinstance(stopped, OutOfTimeError)
    worst = largest_of_workers(float(is_late or 2 * (stopped is not None)), world)
    if worst:
        kind = OutOfTimeError if worst == 1 else SideEffectError
        raise stopped or kind("another worker could not trace the step")
    return msgspec.json.decode(share_bytes(mine, world), type=Workload)
