"""`Step` and `Recording`: what is traced, and what the recorder found of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.plan import MemoryFormat, Precision
from ridgeline.tracing.recorder import StepRecorder

LossFn = Callable[[nn.Module, Any], Tensor]


class Step(NamedTuple):
    """What is traced, in which precision and memory format; `check` is called at every operator."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: Optimizer
    batch: Any
    precision: Precision = "as-is"
    memory_format: MemoryFormat = "as-is"
    check: Callable[[], None] = lambda: None
    clip_norm: float | None = None


@dataclass(frozen=True)
class Recording:
    """A recorded step: `ready` maps parameter names, in ready order, to the op that completed them.

    `is_estimated` says that the optimizer's ops were not recorded.
    """

    recorder: StepRecorder
    ready: dict[str, int]
    fused_optimizer_bytes: int
    is_estimated: bool
    notes: tuple[str, ...]
