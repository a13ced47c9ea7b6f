"""`History`: how a training run went: loss and speed by step, the metric by epoch."""

from typing import ClassVar

from ridgeline.codec import Noun, Value


class StepPoint(Value, frozen=True, kw_only=True):
    """State of the run at one reported step: mean loss over the workers and samples per second."""

    step: int
    epoch: int
    loss: float
    samples_per_s: float


class EpochPoint(Value, frozen=True, kw_only=True):
    """One finished epoch: `metric` on the test data, mean training loss, seconds of training."""

    epoch: int
    step: int
    metric: float
    mean_loss: float
    train_s: float


class History(Noun, frozen=True, kw_only=True):
    """The course of a training run, saved as `history.json`."""

    kind: ClassVar[str] = "history"

    task: str
    steps: tuple[StepPoint, ...] = ()
    epochs: tuple[EpochPoint, ...] = ()
