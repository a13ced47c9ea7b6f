"""`run_cases`: such an experiment on this machine, case by case, inside a time limit."""

from collections.abc import Callable, Sequence

import torch

from ridgeline.errors import TaskError
from ridgeline.experiments.contests import Progress, silent, versions
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.contest import hold
from ridgeline.experiments.ways.holding import rooms_s
from ridgeline.experiments.ways.result import WayCase, WayExperiment, WayName
from ridgeline.probe.host.fingerprint import devices, host

LIMITS_S = {True: 60.0, False: 180.0}
"""Quick or not to the seconds that an experiment takes, about."""
LEAST_S = 2.0
"""For a case whose time earlier ones have used up: three turns of everyone are taken all the same."""

MakeCases = Callable[[str, bool], Sequence[Case]]
"""Lists the cases of `cpu` or `cuda`, quick or not; makes no inputs yet."""


def run_cases(
    name: WayName,
    make_cases: MakeCases,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    progress: Progress = silent,
) -> WayExperiment:
    """Do the work of every case in every way, and compare them in turns.

    Args:
        name: Of the experiment.
        make_cases: Lists its cases.
        quick: Fewer and smaller ones.
        only: Names of cases to take; none: all.
        limit_s: Seconds to take, about; None: 60 quick, 180 else.
        device: `cpu` or `cuda`; None takes the GPU where there is one.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: there is no case of a name.

    Cost: Keeps the machine busy for about `limit_s`.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = make_cases(kind, quick)
    # Before anything is timed: a misspelt name would show after minutes.
    check_names(name, [case.name for case in found], only)
    chosen = [case for case in found if not only or case.name in only]
    limit = LIMITS_S[quick] if limit_s is None else limit_s
    # What cannot be held takes no time from the others.
    weights = [0.0 if case.lacking else case.weight for case in chosen]
    rooms = rooms_s(weights, limit_s=limit, least_s=LEAST_S)
    results = [
        hold(case, limit_s=room_s, progress=progress)
        for case, room_s in zip(chosen, rooms, strict=True)
    ]
    return experiment_of(name, results, quick=quick, limit_s=limit)


def check_names(name: WayName, known: Sequence[str], only: Sequence[str]) -> None:
    """Refuse cases that there are not.

    Raises:
        TaskError: there is no case of a name.
    """
    unknown = [case for case in only if case not in known]
    if unknown:
        raise TaskError(
            f"wanted cases out of {', '.join(known)}, got {', '.join(unknown)} for the experiment {name}; "
            "name some of those"
        )


def experiment_of(
    name: WayName, cases: Sequence[WayCase], *, quick: bool, limit_s: float
) -> WayExperiment:
    """The experiment on this machine that consists of these cases."""
    return WayExperiment(
        name=name,
        host=host(),
        devices=devices(),
        versions=versions(),
        is_quick=quick,
        limit_s=limit_s,
        cases=tuple(cases),
    )
