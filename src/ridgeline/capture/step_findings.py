"""What is found out of one step under its plans, for those that come after."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepFindings:
    """Shared by the steps of one model, loss function and optimizer; what was read holds a batch.

    Attributes:
        readings: Guards of model and loss function; see `StepReads`.
        cleared: Steps that were captured; see `runtime.cleared`.
        value_shapes: Operators whose shapes depend on values; see `runtime.checked`.
        digests: Of steps that were captured; see `runtime.cleared`.
        earlier_digests: Of those that an earlier process captured.
    """

    readings: list[Any] = field(default_factory=list)
    cleared: list[Any] = field(default_factory=list)
    value_shapes: list[str] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)
    earlier_digests: frozenset[str] = frozenset()
