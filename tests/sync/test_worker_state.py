"""Scripts of the user's own save what a worker alone remembers, and continue to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from worker_state_cases import CASES

from torchrun import torchrun

OTHER = (
    "wanted the worker_state() of a worker with {0}, as the step has it, got {1}; load that of the same rank into "
    "a step of the same plan, or leave it out: what was not sent of gradients is lost then, and a rhythm begins anew"
)
LATE = (
    "wanted a step that has not trained yet, got one after 1 steps; load the worker_state() before the first of "
    "them"
)
FOREIGN = (
    "wanted the worker_state() of a worker that trains this model, got one that remembers {0}, which is no parameter "
    "of Net; load it into a step of the model that it was saved with, or leave it out"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two workers over gloo found, in one start."""
    output = tmp_path_factory.mktemp("worker_state") / "found.json"
    torchrun(2, Path(__file__).parent / "worker_state_cases.py", output)
    told: dict[str, Any] = json.loads(output.read_text())
    return told


@pytest.mark.parametrize("name", CASES)
def test_a_script_that_begins_again_continues_to_the_bit(found: dict[str, Any], name: str) -> None:
    """On both workers: with what was not sent of gradients, common parameters, and what was on its way."""
    assert found[name] == 2


def test_states_of_other_steps_are_refused(found: dict[str, Any]) -> None:
    """What differs is named, and what is lost without it."""
    assert found["refused"] == [
        LATE,
        OTHER.format("rank=0", "rank=7"),
        OTHER.format("workers=2", "workers=3"),
        OTHER.format("compression='none'", "compression='int8'"),
        OTHER.format(
            "options={'held': 0, 'outer': 'average', 'fragments': 1, 'delay': 1}",
            "options={'held': 0, 'block': 1024}",
        ),
        (
            "wanted what worker_state() returned, got NoneType; load that of the same rank, or leave it out"
        ),
        (
            "wanted a whole worker_state(), got one without 'order'; load it as worker_state() returned it, or "
            "leave it out"
        ),
        FOREIGN.format("old.weight"),
        FOREIGN.format("old.bias"),
    ]
