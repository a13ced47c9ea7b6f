"""All that a full measurement finds beside ceilings and tables by size, for terminal and page."""

from ridgeline.machine import Machine
from ridgeline.reporting.effects.contention_effects import contention_effects
from ridgeline.reporting.effects.dispatch_effects import dispatch_effects
from ridgeline.reporting.effects.gpu_effects import gpu_effects
from ridgeline.reporting.effects.microarchitecture import host_effects
from ridgeline.reporting.effects.system_effects import limits_effects, storage_effects
from ridgeline.reporting.grid import Grid


def machine_effects(machine: Machine) -> tuple[Grid, ...]:
    """Those that were measured: what issuing and overlapping cost, then GPU, host, files and limits."""
    return (
        *dispatch_effects(machine.operator_dispatch),
        *contention_effects(machine.contention),
        *gpu_effects(machine.gpu),
        *host_effects(machine.microarchitecture),
        *storage_effects(machine.storage),
        *limits_effects(machine.limits),
    )
