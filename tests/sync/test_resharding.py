"""Checkpoints of a divided update: whole on the disk, so any number of workers goes on, by any algorithm, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from resharding_cases import CHANGES, STOP_AT, WAYS, Way

from torchrun import torchrun


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What three workers over gloo found, in one start."""
    folder = tmp_path_factory.mktemp("resharding")
    torchrun(3, Path(__file__).with_name("resharding_cases.py"), folder)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_maths_is_that_of_one_worker(told: dict[str, Any], way: Way) -> None:
    """Undisturbed runs end with the same bits: what follows is no matter of rounding."""
    assert told["differing"][f"whole {way}"] == []
    assert told["begun"][str(way)] == f"step-{STOP_AT - 1:07d}"


def test_what_is_compared(told: dict[str, Any]) -> None:
    """All parameters, and all that the optimizer remembers of those that are trained."""
    remembered = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert told["names"] == sorted(
        [
            *("groups", "step"),
            *(f"model.{name}" for name in ("wide", "some", "one", "frozen")),
            *(f"optimizer.state.{number}.{key}" for number in range(3) for key in remembered),
        ]
    )


@pytest.mark.parametrize("then", WAYS, ids=str)
@pytest.mark.parametrize("begun", WAYS, ids=str)
def test_any_run_goes_on_in_any_way(told: dict[str, Any], begun: Way, then: Way) -> None:
    """Stopped in the middle of an epoch, with buckets cut elsewhere since: it ends with the bits of one never stopped."""
    assert told["differing"][f"{begun}, then {then}"] == []


@pytest.mark.parametrize("algorithm", ["all_reduce", "sharded"])
def test_as_many_workers_add_up_in_the_same_order(told: dict[str, Any], algorithm: str) -> None:
    """Where every order rounds otherwise, three workers end with the bits of those that were never stopped."""
    assert told["rounded"][algorithm] == []


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_was_left_out_is_sent_by_any_number_of_workers(
    told: dict[str, Any], change: tuple[int, int]
) -> None:
    """What arrived of the mean gradients, and the mean of what is left, is the sum of all of them."""
    found = told["left"][f"{change[0]}, then {change[1]}"]
    assert found["left"] > 0.05
    assert found["gap"] < 1e-5
