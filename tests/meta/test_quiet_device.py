"""How tests compare times on a GPU: again where something came between, and never against somebody else's work."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import quiet_device
from quiet_device import ATTEMPTS, holds_when_quiet, in_turns


def test_what_holds_once_holds() -> None:
    """A disturbed measurement is made again, a good one is the last."""
    said = ["slow", "slow", "", "never asked"]
    holds_when_quiet(lambda: said.pop(0), others=lambda: "")
    assert said == ["never asked"]


def test_what_never_holds_fails_with_every_measurement() -> None:
    """After a bounded number of attempts, where nobody else is there."""
    said = [f"measurement {index}" for index in range(ATTEMPTS)]
    with pytest.raises(pytest.fail.Exception, match=f"^{'; '.join(said)}$"):
        holds_when_quiet(lambda: said.pop(0), others=lambda: "")
    assert said == []


def test_others_on_the_device_leave_the_question_open() -> None:
    """Skipped, with who it is and what was measured; but not where it held all the same."""
    with pytest.raises(pytest.skip.Exception, match=r"^used by 7; measured: slow; slow$"):
        holds_when_quiet(lambda: "slow", attempts=2, others=lambda: "used by 7")
    holds_when_quiet(lambda: "", others=lambda: "used by 7")


def test_runs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn of each does not count, and of the others the shortest does."""
    now, order = [0.0], list[str]()
    monkeypatch.setattr(quiet_device.time, "perf_counter", lambda: now[0])
    takes = {"a": [9.0, 3.0, 1.0, 2.0], "b": [0.5, 5.0, 6.0, 4.0]}

    def run(name: str) -> None:
        order.append(name)
        now[0] += takes[name].pop(0)

    found = in_turns({name: lambda name=name: run(name) for name in takes}, turns=3)
    assert found == {"a": 1.0, "b": 4.0}
    assert order == ["a", "b"] * 4
