"""Trials in processes of their own: what compiles has a limit, and how they fail is said in one line."""

from pathlib import Path

import pytest

from ridgeline.cli.training.apart import try_apart
from ridgeline.cli.training.worker import Job, TrialRequest
from ridgeline.errors import LaunchError, ObstacleError
from ridgeline.plan import Execution, Plan
from ridgeline.probe.groups.group import WorkerError
from ridgeline.probe.groups.worker_error import Raised

MANY_OBSTACLES = "\n".join(["wanted a loss that stays, got 40 obstacles:", *["- item"] * 40])


def asked(task: str, execution: Execution) -> TrialRequest:
    plan = Plan(threads=2, execution=execution)
    return TrialRequest(job=Job(task=task), plan=plan, device="cpu", seed=0)


@pytest.mark.parametrize(("execution", "limit_s"), [("eager", float("inf")), ("compiled", 600.0)])
def test_what_compiles_has_a_limit(
    execution: Execution, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long steps are no reason to stop; a compiler that does not come back is."""
    limits: list[float] = []

    def late(*_: object, deadline_s: float, **__: object) -> bytes:
        limits.append(deadline_s)
        raise WorkerError("", rank=0, how="no end", is_late=True, last_line="lowering the graph")

    monkeypatch.setattr("ridgeline.probe.groups.group.run_in_group", late)
    with pytest.raises(LaunchError) as caught:
        try_apart(asked("mlp", execution))
    assert limits == [limit_s]
    if execution == "compiled":
        assert str(caught.value) == (
            "wanted a trial of 1 worker x 2 threads, compiled within 600 s, got no result from rank 0 of "
            "1: lowering the graph; it was stopped: if no other plan runs, name one by --plan"
        )


def test_a_trial_that_does_not_come_back_is_stopped(
    tmp_path: Path, task_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ending its process, whatever that does."""
    path = Path(task_file)
    path.write_text("while True:\n    pass\n" + path.read_text())
    monkeypatch.setattr("ridgeline.decision.trial.LONGEST_S", 1.5)
    with pytest.raises(LaunchError, match=r"compiled within 1\.50 s, got no result from rank 0"):
        try_apart(asked(task_file, "compiled"))


def test_an_obstacle_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever chooses then replays the model alone; the message and its lines are those of the worker."""

    def fail(*_: object, **__: object) -> bytes:
        raise WorkerError(
            "wanted 1 worker to finish, got exit code 1; its last output: ...",
            rank=0,
            how="exit code 1",
            raised=Raised(1, "ObstacleError", MANY_OBSTACLES),
        )

    monkeypatch.setattr("ridgeline.probe.groups.group.run_in_group", fail)
    with pytest.raises(ObstacleError) as caught:
        try_apart(asked("mlp", "graph"))
    assert str(caught.value) == MANY_OBSTACLES


@pytest.mark.parametrize(
    ("signal", "how", "told"),
    [
        (0, "exit code 1", "exit code 1 from rank 1 of 1: ValueError: odd"),
        (9, "signal 9 (SIGKILL)", "signal 9 (SIGKILL) from rank 1 of 1"),
    ],
)
def test_the_first_line_says_why_a_trial_failed(
    signal: int, how: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan's failure is told in a line; all that its worker printed last follows."""

    def fail(*_: object, **__: object) -> bytes:
        raise WorkerError("all of it", rank=1, how=how, signal=signal, last_line="ValueError: odd")

    monkeypatch.setattr("ridgeline.probe.groups.group.run_in_group", fail)
    with pytest.raises(LaunchError) as caught:
        try_apart(asked("mlp", "eager"))
    assert (
        str(caught.value) == f"wanted a trial of 1 worker x 2 threads, eager, got {told}\nall of it"
    )
