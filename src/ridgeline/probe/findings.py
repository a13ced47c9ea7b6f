"""`Request` and `Findings`: what processes that measure are asked for, and what they answer."""

from ridgeline.codec import Value
from ridgeline.machine import (
    Ceiling,
    CodecTiming,
    Collective,
    Dispatch,
    Link,
    OperatorTiming,
    Overlap,
    Setting,
    StepCheck,
)
from ridgeline.workload import Workload

TraceKey = tuple[Setting, str, str]
"""What identifies a timed trace of a step: the setting, the precision and the memory format."""

BY_SETTING = ("ceilings", "collectives", "codecs")
"""Fields of a request that have settings; those of findings have an entry or more for each of them."""


class Request(Value, frozen=True, kw_only=True):
    """What to measure, and at which settings.

    `skip` are keys of operators that are not to be issued; `timed` are the traces whose operators are known;
    `samples_s` are seconds of samples for each trace, and `visits` are those to each number; None for the
    usual number.
    """

    quick: bool
    ceilings: tuple[Setting, ...] = ()
    collectives: tuple[Setting, ...] = ()
    codecs: tuple[Setting, ...] = ()
    timings: tuple[Setting, ...] = ()
    dispatch: bool = False
    links: bool = False
    workload: Workload | None = None
    skip: tuple[str, ...] = ()
    timed: tuple[TraceKey, ...] = ()
    samples_s: float | None = None
    visits: int | None = None

    @property
    def traces(self) -> tuple[Workload, ...]:
        """The step as it was written, then in other precisions and memory formats."""
        return (self.workload, *self.workload.variants) if self.workload is not None else ()

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting that something is measured at, fewest workers first; links take one worker."""
        every = dict.fromkeys((*self.ceilings, *self.collectives, *self.codecs, *self.timings))
        if not every and self.links:
            return (Setting(device="cuda"),)
        return tuple(sorted(every, key=lambda s: (s.workers, s.threads)))


class Findings(Value, frozen=True, kw_only=True):
    """What was measured: parts of a `Machine`."""

    ceilings: tuple[Ceiling, ...] = ()
    dispatch: tuple[Dispatch, ...] = ()
    collectives: tuple[Collective, ...] = ()
    links: tuple[Link, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    codecs: tuple[CodecTiming, ...] = ()
    timings: tuple[OperatorTiming, ...] = ()
    checks: tuple[StepCheck, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: "Findings") -> "Findings":
        """Both findings, one after the other."""
        return Findings(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )
