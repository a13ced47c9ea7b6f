"""`ridgeline train` whose worker dies by SIGKILL while it saves, and again at the very end."""

import errno
from pathlib import Path

import pytest
import torch

from ridgeline.cli import report as pages
from ridgeline.cli.main import main
from ridgeline.history import History
from ridgeline.plan import Plan
from ridgeline.reporting.report import report
from ridgeline.runtime.checkpoints import checkpoint

TASK = str(Path(__file__).with_name("killed_task.py"))


@pytest.mark.timeout(300)  # four starts of the whole command
def test_killed_twice_and_resumed(
    tmp_path: Path,
    machine_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last state is that of an undisturbed run, though the second kill comes after the last step."""
    plan = Plan(workers=2, threads=1).save(tmp_path / "given.json")
    words = ["train", TASK, "-o"]
    given = [
        "--machine", str(machine_file), "--plan", str(plan), "--epochs", "1", "--checkpoint-every", "2",
    ]  # fmt: skip
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main([*words, str(whole), *given]) == 0
    saves = run / "checkpoints"
    monkeypatch.setenv("KILL_IN", str(saves))
    for stop, more in (
        ("rename /.step-0000004.tmp", given),
        ("unlink /.step-0000002.old", ["--resume"]),
    ):
        monkeypatch.setenv("KILL_AT", stop)
        capsys.readouterr()
        assert main([*words, str(run), *more]) == 1
        assert "a death by signal 9 (SIGKILL" in capsys.readouterr().err
    monkeypatch.delenv("KILL_AT")
    assert (saves / ".step-0000002.old").is_dir()

    def full(page: Path, **_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(page))

    monkeypatch.setattr(pages, "report", full)
    assert main([*words, str(run), "--resume"]) == 1
    assert capsys.readouterr().err.endswith(
        f"ridgeline: wanted to write the pages of the run in {run}, which is trained to its end, got No space "
        f"left on device ({run / 'report.html'}); make room, and run `ridgeline report {run}`\n"
    )
    monkeypatch.setattr(pages, "report", report)
    assert main([*words, str(run), "--resume"]) == 0
    told = capsys.readouterr()
    assert f"going on from {saves / 'step-0000008'}" in told.err.replace("\n", "")
    assert "no verdict: the run was killed after its last step" in told.out
    names = ["step-0000004", "step-0000006", "step-0000008"]
    assert sorted(path.name for path in saves.iterdir()) == names
    _, model, training, _ = checkpoint.read(saves / names[-1])
    _, same_model, same_training, _ = checkpoint.read(whole / "checkpoints" / names[-1])
    for mine, theirs in ((model, same_model), (training, same_training)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    losses = [
        [point.loss for point in History.load(place / "history.json").steps]
        for place in (whole, run)
    ]
    assert losses[0] == losses[1]
    assert (run / "report.html").is_file()
