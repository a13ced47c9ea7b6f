"""Buckets that are held until backward has ended, and parameters that are updated when they are read.

Gradients come from the last layer to the first, but the next forward pass reads the first layers first. On a
slow link the first layers' buckets would wait behind all others. `held` of the last buckets (never the first
one, which carries the workers' signals) therefore wait for the end of backward, and leave in the opposite
order; the step returns while they are on their way, and a parameter in them is updated when it is first read.
The order is the plan's, so that all workers start the same exchanges in the same order.

Source: Jayarajan et al., "Priority-based parameter propagation" (P3), MLSys 2019; Peng et al.,
"ByteScheduler", SOSP 2019. Both decide by what waits at a moment, and need a server or a coordinator for it.
"""

from ridgeline.synchronisation.entries import Option
from ridgeline.synchronisation.sync import Sync

HELD = Option("held", int, 0, least=0)


def holds(sync: Sync) -> bool:
    """Whether a plan holds buckets, so that a step returns before all parameters are updated."""
    return bool(sync.options.get(HELD.name, HELD.default))


def num_held(sync: Sync, num_buckets: int) -> int:
    """How many of the last buckets are held: at most all but the first one."""
    return min(int(sync.options.get(HELD.name, HELD.default)), max(0, num_buckets - 1))


def launch_order(num_buckets: int, held: int) -> tuple[int, ...]:
    """The order in which buckets leave: as they are filled, then those that are held, the last one first."""
    early = num_buckets - held
    return (*range(early), *reversed(range(early, num_buckets)))
