"""What a plan is chosen for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ridgeline.machine import Machine
from ridgeline.workload import Workload


class PlanRequest(NamedTuple):
    """What is to be planned for, with everything checked; `steps`, `compile_factor` are those of `choose`."""

    machine: Machine
    workloads: Mapping[int, Workload]
    device: str
    fixed: Mapping[str, Any]
    allow: tuple[str, ...]
    steps: int | None = None
    compile_factor: float = 1.0
