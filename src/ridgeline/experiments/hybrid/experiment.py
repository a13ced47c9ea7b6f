"""`run`: the experiment on this machine, case by case, inside a time limit."""

import dataclasses
from collections.abc import Sequence

import torch

from ridgeline.errors import TaskError
from ridgeline.experiments.contests import Progress, silent, versions
from ridgeline.experiments.hybrid.cases import MODELS, HybridCase, cases, left_out
from ridgeline.experiments.hybrid.contest import contenders_of, hold
from ridgeline.experiments.hybrid.result import PURPOSES, HybridExperiment
from ridgeline.experiments.ways.holding import rooms_s
from ridgeline.probe.host.fingerprint import devices, host

LIMITS_S = {
    ("cpu", True): 100.0,
    ("cpu", False): 330.0,
    ("cuda", True): 180.0,
    ("cuda", False): 450.0,
}
"""Device and quick to the seconds that the experiment may take, but for the contender in the making."""
LEAST_S = 10.0
"""For a case whose time earlier ones have used up: what is not compiled is still compared."""


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = MODELS,
    limit_s: float | None = None,
    cold: bool = False,
    device: str | None = None,
    titles: str = "",
    contenders: Sequence[str] = (),
    progress: Progress = silent,
) -> HybridExperiment:
    """Execute models in every way, ours and the others', and compare them in turns.

    Args:
        quick: Fewer and smaller cases, about two minutes on a CPU.
        only: Models to take, of `MODELS`.
        limit_s: Seconds to take; contenders for which none are left are rows with that reason. None:
            100 or 330 on a CPU (quick or not), 180 or 450 on a GPU.
        cold: Let every contender compile with an empty cache; else the first of a case fills it for all.
        device: `cpu` or `cuda`; None takes the GPU where there is one.
        titles: Take only the cases whose purpose and title ("training 28x28x1, batch 32, ...") contain this.
        contenders: Take only these beside `eager`; none: all.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: a model is unknown, no title fits, or no chosen case has a contender of that name.

    Cost: Compiles, so it takes minutes and keeps the machine busy.
    """
    unknown = [model for model in only if model not in MODELS]
    if unknown or not only:
        raise TaskError(
            f"wanted models out of {', '.join(MODELS)}, got {', '.join(unknown) or 'none'} for the "
            "experiment hybrid; name some of those"
        )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    limit = LIMITS_S[kind, quick] if limit_s is None else limit_s
    chosen = [
        dataclasses.replace(case, is_cold=cold)
        for case in cases(kind, quick=quick, only=only)
        if titles in f"{PURPOSES[case.purpose]} {case.title}"
    ]
    if not chosen:
        raise TaskError(
            f"wanted a case whose purpose and title contain {titles!r}, got none among {', '.join(only)} on "
            f"{kind}; leave it out to see them all"
        )
    # Before anything runs: a misspelt name would show after minutes.
    _check_contenders(contenders, chosen)
    # By weight: what compiles more, or is trained, takes longer.
    rooms = rooms_s([case.weight for case in chosen], limit_s=limit, least_s=LEAST_S)
    results = [
        hold(case, limit_s=min(limit, room_s), names=contenders, progress=progress)
        for case, room_s in zip(chosen, rooms, strict=True)
    ]
    return HybridExperiment(
        host=host(),
        devices=devices(),
        versions=versions(),
        is_quick=quick,
        limit_s=limit,
        cases=tuple(results),
        notes=left_out(kind, quick=quick, only=only),
    )


def _check_contenders(names: Sequence[str], chosen: Sequence[HybridCase]) -> None:
    known = list(dict.fromkeys(one.name for case in chosen for one in contenders_of(case)))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise TaskError(
            f"wanted contenders out of {', '.join(known)}, got {', '.join(unknown)}; name some of those"
        )
