"""`run`: the models, trained over links of each rate."""

import time
from collections.abc import Sequence

import msgspec

from ridgeline.experiments import namespaces
from ridgeline.experiments.contests import Progress, silent
from ridgeline.experiments.sync.steps import CASES, QUICK_CASES
from ridgeline.experiments.ways.experiment import LEAST_S, check_names, experiment_of
from ridgeline.experiments.ways.result import WayCase, WayExperiment
from ridgeline.experiments.ways.together import GroupRequest, WorkersPlace, hold_together
from ridgeline.probe.host.fingerprint import num_cores

UNSHAPED = "none"
RATES = {True: ("1gbit", UNSHAPED), False: ("100mbit", "1gbit", UNSHAPED)}
"""Quick or not to the rates of the link."""
LIMITS_S = {True: 90.0, False: 360.0}
"""Quick or not to the seconds for timing. Of a slow link every step takes seconds: at 100 Mbit/s the least
turns of all ways of ResNet-18 take five minutes."""


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    rates: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    progress: Progress = silent,
) -> WayExperiment:
    """Train models over links of several rates, in turns with what torch offers.

    The workers are two hosts on this machine, as network namespaces. Where these cannot be made two local
    workers train instead, over a link that is not shaped, and where there are several GPUs all of them do.

    Args:
        quick: Fewer rates, models, ways and turns.
        only: Models, by name; none: all, or `resnet18` where it is to be quick.
        rates: Of the link, e.g. `100mbit`, or `none`; none given: some.
        limit_s: Seconds for timing, about; None: 90 quick, 360 else.
        device: `cpu` or `cuda`; None takes GPUs where there are several.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: there is no model of a name.
        LaunchError: a rate is not written as one, or hosts could not be made.
        WorkerError: a worker failed otherwise than in one of the ways.

    Cost: Keeps the machine busy for about `limit_s`, and as long again for measuring it.
    """
    check_names("sync", CASES, only)
    place = WorkersPlace.of(device, None)
    # Refused before minutes are spent on other rates.
    for rate in rates:
        if rate != UNSHAPED:
            namespaces.bytes_per_s(rate)
    chosen = tuple(rates) or (RATES[quick] if place.device == "cpu" else (UNSHAPED,))
    limit = LIMITS_S[quick] if limit_s is None else limit_s
    end = time.perf_counter() + limit
    cases: list[WayCase] = []
    for index, rate in enumerate(chosen):
        progress(f"sync: a link of {rate}" if rate != UNSHAPED else "sync: an unshaped link")
        asked = GroupRequest(
            home="ridgeline.experiments.sync.steps",
            device=place.device,
            quick=quick,
            only=tuple(only) or (QUICK_CASES if quick else CASES),
            # What is left is shared by the rates that are to come.
            limit_s=max(LEAST_S, (end - time.perf_counter()) / (len(chosen) - index)),
            rate="" if rate == UNSHAPED else rate,
        )
        cases += _held(asked, place.workers, progress)
    return experiment_of("sync", cases, quick=quick, limit_s=limit)


def _held(asked: GroupRequest, workers: int, progress: Progress) -> Sequence[WayCase]:
    """The cases at one rate, on hosts of their own where that is possible."""
    if asked.device == "cuda":
        lacking = "GPUs of one host are joined by links that cannot be shaped"
    else:
        lacking = namespaces.lacking(is_shaped=bool(asked.rate))
        if lacking:
            lacking = f"no network namespaces: this machine lacks {lacking}"
    # Workers share the cores of this machine, as hosts of their own would not.
    threads = 0 if asked.device == "cuda" else max(1, num_cores() // workers)
    if not lacking:
        with namespaces.hosts(workers, asked.rate or None) as network:
            return hold_together(
                asked, workers=workers, threads=threads, network=network, progress=progress
            )
    if asked.rate:
        return [
            WayCase(name=name, title=f"a link of {asked.rate}", skipped=lacking)
            for name in asked.only
        ]
    alone = msgspec.structs.replace(asked, lacking=lacking)
    return hold_together(alone, workers=workers, threads=threads, progress=progress)
