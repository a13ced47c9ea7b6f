"""`History`: how a training run went: loss and speed by step, the metric by epoch."""

from collections.abc import Iterable
from typing import ClassVar

from ridgeline import units
from ridgeline.codec import Noun, Value

NOT_FINITE = "not finite"


class StepPoint(Value, frozen=True, kw_only=True):
    """State of the run at one reported step: mean loss over the workers and samples per second."""

    step: int
    epoch: int
    loss: float
    samples_per_s: float


class EpochPoint(Value, frozen=True, kw_only=True):
    """One finished epoch: `metric` on the test data, mean training loss, seconds of training.

    `metric` is None where it was NaN or infinite, for which JSON has no number.
    """

    epoch: int
    step: int
    metric: float | None
    mean_loss: float
    train_s: float


class History(Noun, frozen=True, kw_only=True):
    """The course of a training run, saved as `history.json`."""

    kind: ClassVar[str] = "history"

    task: str
    steps: tuple[StepPoint, ...] = ()
    epochs: tuple[EpochPoint, ...] = ()


def metric_text(value: float | None, others: Iterable[float | None]) -> str:
    """A mean metric for people: as a percentage as long as all of its run may be shares (accuracies).

    Args:
        value: None was not finite.
        others: The metrics of the same run so far, which decide the unit.
    """
    if value is None:
        return NOT_FINITE
    known = [other for other in (value, *others) if other is not None]
    is_share = all(0.0 <= other <= 1.0 for other in known)
    return units.percent(value) if is_share else units.digits3(value)
