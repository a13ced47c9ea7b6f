"""What the user fixed of a training run, and what that leaves to the search."""

from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.cli.arguments.inputs import MEMORY_FORMATS, precisions_of
from ridgeline.errors import PlanError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner.exchanges.exchanges import may_encode

TRIES = 3
"""Candidates tried for real; with them a wrong prediction costs a trial, not a training run."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user fixed; None is left to the search.

    Attributes:
        plan: A whole plan: nothing is searched.
        workers: Number of workers.
        threads: Torch threads per worker.
        machine_file: A saved profile instead of measuring.
        tries: Candidates tried for real; 0 trusts the simulator.
        allow: Changes of the maths that the search may make.
    """

    plan: Plan | None = None
    workers: int | None = None
    threads: int | None = None
    machine_file: Path | None = None
    tries: int = TRIES
    allow: tuple[str, ...] = ()

    @property
    def machine(self) -> Machine | None:
        """The saved profile.

        Raises:
            FileFormatError: the file is no machine profile.
        """
        return None if self.machine_file is None else Machine.load(self.machine_file)

    @property
    def knobs(self) -> dict[str, int]:
        """What the search must leave as it is."""
        numbers = {"workers": self.workers, "threads": self.threads}
        return {name: number for name, number in numbers.items() if number is not None}

    @property
    def forms(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Precisions, and memory formats, that the step may run in besides the model's own."""
        if self.plan is None:
            return precisions_of(self.allow), MEMORY_FORMATS
        return (self.plan.precision,), (self.plan.memory_format,)

    @property
    def may_encode(self) -> bool:
        """Whether gradients may be sent in fewer bits."""
        return may_encode(self.allow, self.plan)


def settled(wishes: Wishes) -> Wishes:
    """The wishes with the numbers of a given plan filled in.

    Raises:
        PlanError: plan and numbers contradict each other.
    """
    if wishes.plan is None:
        return wishes
    for name, wanted, planned in (
        ("workers", wishes.workers, wishes.plan.workers),
        ("threads", wishes.threads, wishes.plan.threads),
    ):
        if wanted is not None and wanted != planned:
            raise PlanError(
                f"wanted --{name} {wanted}, got {name}={planned} in the plan; give one of them"
            )
    # A plan says by 0 that it leaves the threads alone, a wish by None.
    return replace(wishes, workers=wishes.plan.workers, threads=wishes.plan.threads or None)
