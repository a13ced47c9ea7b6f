"""`ridgeline train`: the loop from a task to a report, and every way in which it may end."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline import units
from ridgeline.cli.main import main
from ridgeline.cli.training.worker import TrainRequest
from ridgeline.history import History
from ridgeline.plan import Plan, Sync
from ridgeline.planner.labels import label
from ridgeline.runtime.checkpoints import checkpoint, checkpoint_directory
from ridgeline.simulator.replay import replayed
from ridgeline.synchronisation import without_named_workers
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict
from ridgeline.workers.blackbox import read_moment

TASK = str(Path(__file__).with_name("training_tasks.py"))
FILES = [
    "blackbox",
    "checkpoints",
    "expected.json",
    "history.json",
    "logs",
    "machine.json",
    "measured.json",
    "plan.json",
    "predicted.json",
    "ranking.json",
    "report.html",
    "request.json",
    "trace.json.gz",
    "verdict.json",
    "workload.json",
]


def arguments(run_dir: Path, machine_file: Path, *more: str) -> list[str]:
    """A training of two workers without measurements and trials."""
    return [
        "train", TASK, "--machine", str(machine_file), "--no-trials", "--workers", "2", "--threads", "1",
        "-o", str(run_dir), *more,
    ]  # fmt: skip


def test_whole_loop(tmp_path: Path, machine_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command trains, verifies and reports; its directory holds all that is promised, and no more."""
    run_dir = tmp_path / "run"
    status = main(arguments(run_dir, machine_file, "--epochs", "2"))
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(FILES)
    history = History.load(run_dir / "history.json")
    assert [point.step for point in history.steps] == list(range(1, 17))
    assert [point.epoch for point in history.epochs] == [0, 1]
    measured = Timeline.load(run_dir / "measured.json")
    again = replayed(measured)  # the recorded durations, on the clock that predicts
    assert again is not None
    assert abs(again.error) < 0.01
    assert {"forward", "backward/0", "all_reduce/0", "wait", "optimizer"} <= {
        span.name for span in measured.frames
    }
    verdict = Verdict.load(run_dir / "verdict.json")
    assert verdict.error_before is None
    assert Timeline.load(run_dir / "expected.json") == Timeline.load(run_dir / "predicted.json")
    assert (
        f"took {units.nanoseconds(verdict.measured_ns)} ({100 * verdict.error:+.1f} %)" in shown.out
    )
    assert f"tiny  test metric {100 * history.epochs[-1].metric:.1f} % after 2 epochs" in shown.out
    assert re.search(r"Ridgeline's own time: \S+ \Ss a step", shown.out)
    assert f"report: {run_dir / 'report.html'}" in shown.out
    assert shown.err.startswith("tracing a step of tiny for 2 workers\n")
    plan = label(Plan.load(run_dir / "plan.json"))
    assert plan.startswith("2 workers x 1 thread, eager, ")
    assert f"\ntraining with {plan} into " in shown.err
    assert "step 16/16: loss " in shown.err
    assert_refusals(run_dir, machine_file, capsys)


def assert_refusals(run_dir: Path, machine_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run is neither overwritten nor trained again, and belongs to its task."""
    assert main(arguments(run_dir, machine_file)) == 1
    assert capsys.readouterr().err == (
        f"ridgeline: wanted a new or empty run directory, got {run_dir}, which holds something already; name "
        "another with -o, or continue that run with --resume\n"
    )
    assert main(arguments(run_dir, machine_file, "--resume")) == 1
    last = run_dir / "checkpoints" / "step-0000016"
    assert capsys.readouterr().err == (
        f"ridgeline: wanted epochs left to train, got all 2 done in {last}; raise --epochs if the "
        f"schedule of the learning rate allows it, or run `ridgeline report {run_dir}` to see how it went\n"
    )
    file = run_dir / "request.json"
    assert main(arguments(file, machine_file)) == 1
    assert capsys.readouterr().err == (
        f"ridgeline: wanted a new or empty run directory, got {file}, which is no directory; name another "
        "with -o\n"
    )
    request = file.read_bytes()
    for option, value, own in (
        ("--seed", "5", "0"),
        ("--batch-size", "32", "8"),
        ("--allow", "bf16", "nothing allowed"),
    ):
        assert main(["train", TASK, "--resume", "-o", str(run_dir), option, value]) == 1
        assert capsys.readouterr().err == (
            f"ridgeline: wanted to continue the run in {run_dir}, which has {own}, got {option} {value}; "
            "leave it out, or start another run with -o\n"
        )
    assert (run_dir / "request.json").read_bytes() == request
    assert main(["train", "mlp", "--resume", "-o", str(run_dir)]) == 1
    assert f"wanted to resume mlp, got a run of {TASK} in {run_dir}" in capsys.readouterr().err


def test_killed_worker_and_resume(
    tmp_path: Path, machine_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill -9 of a worker ends the run with status 1 and the reason; --resume completes it."""
    run_dir = tmp_path / "run"
    pids: list[int] = []
    has_ended = threading.Event()

    def kill() -> None:
        while not checkpoint_directory.complete(run_dir / "checkpoints")[1:]:
            if has_ended.wait(0.01):
                return
        pids.extend(workers_of(run_dir))
        os.kill(pids[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    status = main(arguments(run_dir, machine_file, "--epochs", "100000"))
    has_ended.set()
    killer.join()
    error = capsys.readouterr().err
    assert status == 1
    assert "ridgeline: wanted 2 workers to finish, got a death by signal 9 (SIGKILL" in error
    assert error.rstrip().endswith("; continue with --resume")
    last = checkpoint_directory.latest(run_dir / "checkpoints")
    assert last is not None
    done = checkpoint.Manifest.load(last / "manifest.json").position
    more = str(done.epoch + 1)
    assert main(arguments(run_dir, machine_file, "--resume", "--epochs", more, "--json")) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["run_dir"] == str(run_dir)
    history = History.load(run_dir / "history.json")
    assert [point.epoch for point in history.epochs] == list(range(done.epoch + 1))


def workers_of(run_dir: Path) -> list[int]:
    """Process ids of the workers of a run, by rank."""
    import psutil

    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # what else this process asks for a moment
            if str(run_dir / "request.json") in child.cmdline():
                found[int(child.environ()["RANK"])] = child.pid
    return [found[rank] for rank in sorted(found)]


def test_bad_loss_ends_with_its_reason(
    tmp_path: Path, machine_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A NaN in the data is found and told in one message, without a traceback."""
    status = main(arguments(tmp_path / "run", machine_file, "--data", str(tmp_path / "bad")))
    error = capsys.readouterr().err
    assert status == 1
    assert re.search(
        r"\nridgeline: wanted finite loss, got NaN or infinity at step [1-8] \(epoch 0\) on rank [01]: the "
        r"batch itself: tensor \[0\] float32\[4, 6\] in \[\S+, \S+\] with 6 of 24 values not finite\. Last "
        r"good checkpoint: none; ",
        error,
    ), error
    assert "Traceback" not in error


def test_full_disk_ends_with_its_reason(tmp_path: Path, machine_file: Path) -> None:
    """A checkpoint that the system refuses to write ends the run with path, need and room."""
    run_dir = tmp_path / "run"
    limit = 4 << 20
    done = subprocess.run(
        [
            sys.executable, "-m", "ridgeline",
            *arguments(run_dir, machine_file, "--data", str(tmp_path / "wide")),
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    target = run_dir / "checkpoints" / "step-0000008"
    assert f"ridgeline: wanted to write the checkpoint {target} (" in done.stderr
    assert "got File too large with " in done.stderr
    assert "Traceback" not in done.stderr
    assert list((run_dir / "checkpoints").iterdir()) == []


def test_under_torchrun(tmp_path: Path, machine_file: Path) -> None:
    """Under torchrun the same command trains in the group that is there, and rank 0 writes.

    A group of another size continues such a run, with its plan for so many workers.
    """
    run_dir = tmp_path / "run"

    def run_in_group(workers: int, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "ridgeline",
            *arguments(run_dir, machine_file, *words, "--json"),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run_in_group(2, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run_dir"] == str(run_dir)
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(set(FILES) - {"logs"})
    moments = [read_moment(run_dir / "blackbox" / f"rank-{rank}.bin") for rank in range(2)]
    assert all(moment is not None for moment in moments)
    before = Plan.load(run_dir / "plan.json").settings
    done = run_in_group(1, "--workers", "1", "--epochs", "2", "--resume")
    assert done.returncode == 0, done.stderr
    alone = msgspec.structs.replace(before, workers=1, sync=without_named_workers(before.sync))
    assert Plan.load(run_dir / "plan.json").settings == alone
    assert TrainRequest.load(run_dir / "request.json").plan == alone


@pytest.mark.parametrize(
    ("plan", "more", "wanted"),
    [
        (
            Plan(workers=2, sync=Sync(algorithm="kvstore", options={"staleness": 1})),
            (),
            ("wanted sync.options['kind']='dist_async' for sync.options['staleness'], got 'dist_sync' in the "
            "plan; set it, or leave the option out"),
        ),
        (Plan(workers=2), ("--workers", "4"), "wanted --workers 4, got workers=2 in the plan; give one of them"),
        (
            Plan(workers=3),
            ("--workers", "3"),
            ("wanted a global batch that 3 workers can share equally, got batch size 8; use --batch-size 6 "
            "or 9"),
        ),
    ],
)  # fmt: skip
def test_plans_that_cannot_run_are_refused_before_anything_starts(
    tmp_path: Path,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
    plan: Plan,
    more: tuple[str, ...],
    wanted: str,
) -> None:
    """What this release cannot run is refused with its field, and nothing is written."""
    file = plan.save(tmp_path / "plan.json")
    run_dir = tmp_path / "run"
    words = ["train", TASK, "--plan", str(file), "--machine", str(machine_file), "-o", str(run_dir)]
    assert main([*words, *more]) == 1
    assert capsys.readouterr().err == f"ridgeline: {wanted}\n"
    assert not run_dir.exists()


def test_unknown_task_and_missing_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Task and data are looked at first."""
    assert main(["train", "resnet19", "-o", str(tmp_path / "run")]) == 1
    assert "got 'resnet19'; did you mean resnet18?" in capsys.readouterr().err
    assert main(["train", "mlp", "--data", str(tmp_path), "-o", str(tmp_path / "run")]) == 1
    assert not (tmp_path / "run").exists()


def test_resume_without_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """There must be a run to resume."""
    assert main(["train", "mlp", "--resume", "-o", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"ridgeline: wanted a run to resume, got no request.json in {tmp_path}; leave out --resume to start "
        "one there\n"
    )
    (tmp_path / "notes.txt").touch()  # none is started where something lies
    assert main(["train", "mlp", "--resume", "-o", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"ridgeline: wanted a run to resume, got no request.json in {tmp_path}; name the directory of a run "
        "with -o, or start one in a new directory\n"
    )


def test_resume_without_a_checkpoint(
    tmp_path: Path, machine_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none is whole the run does not start again; where none was begun it does, and says so."""
    run_dir = tmp_path / "run"
    assert main(arguments(run_dir, machine_file, "--epochs", "1")) == 0
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "step-0000008" / "manifest.json").unlink()
    capsys.readouterr()
    assert main(arguments(run_dir, machine_file, "--resume", "--epochs", "2")) == 1
    assert capsys.readouterr().err == (
        f"ridgeline: wanted a whole checkpoint to continue from, got 1 damaged in {checkpoints}: step-0000008: "
        "manifest.json is missing; restore the files of one, or start again in another run directory\n"
    )
    shutil.rmtree(checkpoints)
    assert main(arguments(run_dir, machine_file, "--resume", "--epochs", "1")) == 0
    wanted = f"no checkpoint was written in {run_dir}: starting from the beginning\n"
    assert capsys.readouterr().err.startswith(wanted)
