"""Servers and workers that are killed with every type of message: nothing acknowledged is lost, nobody hangs."""

import argparse
from collections.abc import Callable, Iterator

import dying
import kills
import pytest
from kill_outcomes import Outcome, report

SEEDS = range(2)
JOBS = 6
"""Kills at a time: most of one is waiting, for the end of a lease."""

Told = Callable[[str, str, int], str]


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[Told]:
    """How a kill failed, by victim, type and seed; those of all selected tests are begun at once."""
    items = (i for i in request.session.items if isinstance(i, pytest.Function))
    chosen = [i.callspec.params for i in items if i.path == request.path and hasattr(i, "callspec")]
    asked = [(one["seed"], one["victim"], one["kind"]) for one in chosen]
    with kills.jobs(JOBS) as begin:
        begun = {one: begin(*one) for one in asked}
        begun[asked[0]].result()  # the threads of the jobs are there, for those who look for leaks
        yield lambda victim, kind, seed: begun[seed, victim, kind].result().error


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", dying.TYPES)
@pytest.mark.parametrize("victim", ["server"])
def test_servers_that_are_killed(victim: str, kind: str, seed: int, told: Told) -> None:
    """Two workers go on, and all that they pushed is in the values once."""
    assert told(victim, kind, seed) == ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", dying.TYPES)
@pytest.mark.parametrize("victim", ["worker"])
def test_workers_that_are_killed(victim: str, kind: str, seed: int, told: Told) -> None:
    """The other one goes on after a lease; the values hold what was acknowledged, and one push more at most."""
    assert told(victim, kind, seed) == ""


def test_outcomes_are_a_table() -> None:
    """A row for each seed and victim; what was not reached is not taken for what held."""
    wanted = argparse.Namespace(seeds=2, first=7, jobs=3)
    outcomes = [
        Outcome(7, "server", "Push", 1.0, 0.5, ""),
        Outcome(7, "worker", "Pull", 1.0, 2.25, "AssertionError"),
    ]
    told = report(outcomes, 3.0, wanted)
    words = [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]
    assert [(row["seed"], row["victim"]) for row in words] == [(7, "server"), (7, "worker")]
    assert (words[0]["Push"], words[0]["Pull"]) == ("held", "not run")
    assert (words[1]["Push"], words[1]["Pull"]) == ("not run", "failed")
    assert (told["killed"], told["wanted"], len(told["failed"])) == (2, 72, 1)
    assert told["longest_wait_s"] == {"server": 0.5, "worker": 2.25}
