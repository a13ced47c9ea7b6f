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


class Outage(Value, frozen=True, kw_only=True):
    """A time in which a worker did not hear of a server of a key-value store; training continued after it.

    Attributes:
        worker: Who missed it.
        server: Which one, from 0.
        address: Where it was found after that.
        began_at: In UTC, as ISO 8601 has it.
        lasted_s: Until it was heard of again.
        pushes_again: How many pushes of the worker were sent again.
        is_replaced: Another process has taken its place; else it came back.
    """

    worker: int
    server: int
    address: str
    began_at: str
    lasted_s: float
    pushes_again: int
    is_replaced: bool

    def __str__(self) -> str:
        again = f"{self.pushes_again} push{'es' * (self.pushes_again != 1)} sent again"
        end = "another took its place" if self.is_replaced else "it came back"
        return (
            f"worker {self.worker} got no answer from server {self.server} from "
            f"{units.moment(self.began_at)} on for {self.lasted_s:.1f} s; {end} at {self.address}, {again}"
        )


class History(Noun, frozen=True, kw_only=True):
    """The course of a training run, saved as `history.json`."""

    kind: ClassVar[str] = "history"

    task: str
    steps: tuple[StepPoint, ...] = ()
    epochs: tuple[EpochPoint, ...] = ()
    outages: tuple[Outage, ...] = ()
    """Of all workers, in the order in which they began."""

    def __repr__(self) -> str:
        said = [f"{len(self.epochs)} epochs", f"{len(self.outages)} outages"]
        if self.steps:
            first, last = self.steps[0], self.steps[-1]
            said.append(f"loss {first.loss:.3g} to {last.loss:.3g} at step {last.step}")
        return f"History({self.task}: {', '.join(said)})"


def metric_text(value: float | None, others: Iterable[float | None]) -> str:
    """A mean metric for people: as a percentage as long as all of its run may be shares (accuracies).

    Args:
        value: None was not finite.
        others: The metrics of the same run so far, which decide the unit.
    """
    if value is None:
        return NOT_FINITE
    # All of the run and not this value alone: a loss that happens to be below 1 would become a percentage.
    known = [other for other in (value, *others) if other is not None]
    is_share = all(0.0 <= other <= 1.0 for other in known)
    return units.percent(value) if is_share else units.digits3(value)
