"""The directory of a run belongs to one process at a time, from the choice of its name on."""

import errno
import os
from pathlib import Path

import pytest

from ridgeline.cli.arguments import run_directory
from ridgeline.cli.arguments.claim import claimed
from ridgeline.cli.main import main
from ridgeline.errors import CheckpointError, RidgelineError


def test_runs_started_together_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is taken as soon as it is chosen, though nothing was written there yet."""
    monkeypatch.chdir(tmp_path)
    with claimed("mlp", None, resume=False) as first, claimed("mlp", None, resume=False) as second:
        assert first != second
        assert first.is_dir()
        assert second.is_dir()


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_is_being_written_is_refused(tmp_path: Path, resume: bool) -> None:
    """By another start as by --resume, with the number of the process that writes it."""
    run_dir = tmp_path / "run"
    with claimed("mlp", run_dir, resume=False):
        (run_dir / "request.json").touch()
        with pytest.raises(RidgelineError) as error, claimed("mlp", run_dir, resume=resume):
            pass
        assert (run_dir / "lock").exists()
    assert str(error.value) == (
        f"wanted a run directory that no other process writes, got {run_dir}, which is being written by "
        f"process {os.getpid()}; wait for it or name another directory with -o"
    )
    with claimed("mlp", run_dir, resume=True) as mine:
        assert mine == run_dir


def test_what_was_made_for_a_refused_run_goes_again(tmp_path: Path) -> None:
    """With the parents that were made for it; a directory of the user stays."""
    with claimed("mlp", tmp_path / "a" / "b", resume=False):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with claimed("mlp", tmp_path / "mine", resume=False):
        pass
    assert list((tmp_path / "mine").iterdir()) == []


def test_the_lock_of_a_killed_process_does_not_count(tmp_path: Path) -> None:
    """What it left behind is no content."""
    (tmp_path / "lock").write_text("1")
    with claimed("mlp", tmp_path, resume=False) as mine:
        (mine / "request.json").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["request.json"]


@pytest.mark.parametrize(
    ("resume", "advice"),
    [
        (False, "name another with -o"),
        (True, "copy the run to where you can, and name the copy with -o"),
    ],
)
def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool, advice: str
) -> None:
    """As on a medium that is read only, with what to do about it."""

    def refusing(path: Path, *_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    if resume:
        (tmp_path / run_directory.REQUEST).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        with pytest.raises(RidgelineError) as caught, claimed("mlp", tmp_path, resume=resume):
            pass
    assert str(caught.value) == (
        f"wanted a run directory that can be written, got Read-only file system for {tmp_path / 'lock'}; make it "
        f"writable, or {advice}"
    )


def test_a_name_that_no_directory_can_have_is_refused(tmp_path: Path) -> None:
    """By what the system says; errors of the run itself stay what they are."""
    given = tmp_path / ("x" * 300)
    with pytest.raises(RidgelineError) as caught, claimed("mlp", given, resume=False):
        pass
    assert str(caught.value) == (
        f"wanted a run directory that can be written, got File name too long for {given}; make it writable, or "
        "name another with -o"
    )
    with pytest.raises(OSError, match="of the run"), claimed("mlp", tmp_path / "a", resume=False):
        raise OSError("of the run")


def test_the_newest_run_is_one_of_the_same_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of another whose name begins alike, and whatever characters the name has."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("gpt2-20260131-1", "gpt2-small-20260131-1", "a[1]-20260131-1")):
        request = Path("runs") / name / run_directory.REQUEST
        request.parent.mkdir(parents=True)
        request.touch()
        os.utime(request, ns=(number, number))
    assert run_directory.newest("gpt2") == Path("runs/gpt2-20260131-1")
    assert run_directory.newest("my/a[1].py") == Path("runs/a[1]-20260131-1")
    with pytest.raises(CheckpointError) as caught:  # one that a user named is not searched for
        run_directory.newest("my/mlp.py")
    assert str(caught.value) == (
        "wanted a run of my/mlp.py to resume, got none named mlp-DATE-NUMBER in runs/; name its directory with -o"
    )


def test_a_lock_that_goes_while_it_is_looked_at_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner removes it last: the one who waited takes a lock of its own."""
    same, looks = os.path.samestat, []

    def removed_once(*stats: os.stat_result) -> bool:
        looks.append(stats)
        if len(looks) == 1:
            raise FileNotFoundError
        return same(*stats)

    monkeypatch.setattr(os.path, "samestat", removed_once)
    with claimed("mlp", tmp_path / "mine", resume=False):
        assert len(looks) == 2


def test_a_damaged_request_is_no_end_of_the_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run was asked for cannot be made again: the error says what can be done without it."""
    (tmp_path / "request.json").write_text('{"kind": ')
    assert main(["train", "mlp", "--resume", "-o", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"ridgeline: wanted to read what the run in {tmp_path} was asked for, got: wanted a train-request file, got "
        f"content that does not fit in {tmp_path}/request.json: Input data was truncated; put that file back from "
        f"a copy, or start a new run with -o and --plan {tmp_path}/plan.json (the state in {tmp_path}/checkpoints "
        "is as it was)\n"
    )
