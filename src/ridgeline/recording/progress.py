"""`Progress`: what a run reports while it trains."""

from ridgeline.codec import Value


class Progress(Value, frozen=True, kw_only=True):
    """The state of a run at a reading, for people to watch.

    `metrics` are those of the finished epochs, None where one was not finite; `exposed_s` is the exposed
    communication of the median step, as far as it was looked at. `total_steps` are those of the whole run.
    """

    epoch: int
    epochs: int
    step: int
    total_steps: int
    loss: float
    samples_per_s: float
    metrics: tuple[float | None, ...] = ()
    exposed_s: float | None = None
