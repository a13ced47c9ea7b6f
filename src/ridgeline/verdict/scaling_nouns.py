"""What measured scaling consists of: runs, points, laws through them, and the whole."""

from typing import ClassVar, Literal, NamedTuple

from ridgeline import laws
from ridgeline.codec import Noun, Value
from ridgeline.plan import Plan
from ridgeline.timeline import Timeline
from ridgeline.workload import Workload

Regime = Literal["strong", "weak"]
LawName = Literal["amdahl", "gustafson", "usl"]


class MeasuredRun(NamedTuple):
    """One run: its name, the step of one worker, as measured and predicted, how and where it was run."""

    name: str
    workload: Workload
    measured: Timeline
    predicted: Timeline | None = None
    plan: Plan | None = None
    fingerprint: str = ""
    """Of the machine; empty where that is unknown."""


class FittedNumber(Value, frozen=True, kw_only=True):
    """A fitted number and the interval that covers 90 % of resampled ones; None where that is unknown.

    A limit or a peak may be infinite, for which JSON has no number: then `value` or `high` is None.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


class MeasuredPoint(Value, frozen=True, kw_only=True):
    """A run in a scaling curve.

    `speedup` compares samples per second with those of the smallest number of workers, per worker of it;
    `serial_fraction` is what that speed-up reveals, by Karp and Flatt where all workers share one batch, by
    Gustafson where each has its own. `low_s` and `high_s` are the quartiles of the measured steps.
    """

    run: str
    workers: int
    samples: int
    """Of each worker and step."""
    num_steps: int
    step_s: float
    low_s: float
    high_s: float
    samples_per_s: float
    speedup: float
    efficiency: float
    serial_fraction: float | None = None
    predicted_s: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured step, minus 1."""
        return None if self.predicted_s is None else self.predicted_s / self.step_s - 1.0


class LawPoint(Value, frozen=True, kw_only=True):
    """Samples per second of a number of workers, by a law."""

    workers: int
    samples_per_s: FittedNumber


class Law(Value, frozen=True, kw_only=True):
    """A law through the points, and what it says of other numbers of workers.

    `rate` are samples per second of one worker, `misses` law over measured point, minus 1, in their order.
    """

    name: LawName
    coefficients: dict[str, FittedNumber]
    rate: FittedNumber
    misses: tuple[float, ...]
    points: tuple[LawPoint, ...] = ()
    note: str = ""

    def throughput(self, workers: float) -> float:
        """Samples per second of so many workers."""
        # None stands for infinity, which a rate of measured samples never is.
        rate = self.rate.value or 0.0
        found = {name: one.value or 0.0 for name, one in self.coefficients.items()}
        if self.name == "gustafson":
            return rate * laws.gustafson(found["serial_fraction"], workers)
        sigma = found["serial_fraction" if self.name == "amdahl" else "sigma"]
        return laws.usl(workers, sigma=sigma, kappa=found.get("kappa", 0.0), rate=rate)


class MeasuredScaling(Noun, frozen=True, kw_only=True):
    """How a training step scales with workers: runs, laws through them, and what is odd about them."""

    kind: ClassVar[str] = "scaling"

    title: str
    regime: Regime
    """`strong`: the workers share one batch, however many they are; `weak`: each has as much as before."""
    points: tuple[MeasuredPoint, ...]
    laws: tuple[Law, ...]
    notes: tuple[str, ...] = ()
