"""What became of kills, in one line and as a table."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import dying

VICTIMS = ("server", "worker")


class Outcome(NamedTuple):
    """What became of the others where one was killed; no `error`: all that should be is so."""

    seed: int
    victim: str
    kind: str
    seconds: float
    longest_wait_s: float
    error: str


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line."""
    failed = sum(bool(one.error) for one in outcomes)
    waits = sorted(one.longest_wait_s for one in outcomes) or [0.0]
    return (
        f"{len(outcomes)} kills, {failed} failed; a survivor came no further for {waits[len(waits) // 2]:.2f} s in "
        f"the median, {waits[-1]:.2f} s at most (a lease is {dying.LEASE_S} s)"
    )


def report(
    outcomes: Sequence[Outcome], seconds: float, wanted: argparse.Namespace
) -> dict[str, Any]:
    """All outcomes as a table: for each seed and victim a word for each type of message."""
    words = {
        (one.seed, one.victim, one.kind): "failed" if one.error else "held" for one in outcomes
    }
    rows = [
        [seed, victim, *(words.get((seed, victim, kind), "not run") for kind in dying.TYPES)]
        for seed in sorted({one.seed for one in outcomes})
        for victim in VICTIMS
    ]
    return {
        "summary": summary(outcomes),
        "wanted": len(VICTIMS) * len(dying.TYPES) * wanted.seeds,
        "killed": len(outcomes),
        "failed": [one._asdict() for one in outcomes if one.error],
        "seconds": seconds,
        "jobs": wanted.jobs,
        "lease_s": dying.LEASE_S,
        "elements": dying.SIZE,
        "longest_wait_s": {
            victim: max(
                (one.longest_wait_s for one in outcomes if one.victim == victim), default=0.0
            )
            for victim in VICTIMS
        },
        "columns": ["seed", "victim", *dying.TYPES],
        "rows": rows,
    }
