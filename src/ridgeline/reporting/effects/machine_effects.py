"""All that a full measurement finds beside ceilings, tables by size and files, for terminal and page."""

from ridgeline.machine import Machine
from ridgeline.reporting.effects.contention_effects import contention_effects
from ridgeline.reporting.effects.dispatch_effects import dispatch_effects
from ridgeline.reporting.effects.effects import Effect
from ridgeline.reporting.effects.gpu_effects import gpu_effects
from ridgeline.reporting.effects.microarchitecture import host_effects


def machine_effects(machine: Machine) -> tuple[Effect, ...]:
    """Those that were measured: what issuing and overlapping cost, then the GPU, then the host."""
    return (
        *dispatch_effects(machine.operator_dispatch),
        *contention_effects(machine.contention),
        *gpu_effects(machine.gpu),
        *host_effects(machine.microarchitecture),
    )
