"""What a resumed run keeps of the run before, and what a refused one leaves as it was."""

import argparse
import shutil
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.arguments.wishes import Wishes
from ridgeline.cli.main import main
from ridgeline.cli.train import TrainCommand
from ridgeline.cli.training.order import Order, order_from, resumed_wishes
from ridgeline.cli.training.worker import TrainRequest
from ridgeline.errors import PlanError
from ridgeline.plan import Layout, Plan, Sync
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict
from strategies import make_machine

SOURCE = Path(__file__).with_name("training_tasks.py").read_text()
SCHEDULED = """
def schedule(optimizer, steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a task file, its data, and a run of one epoch with a schedule."""
    home = tmp_path_factory.mktemp("finished")
    source = (
        SOURCE.replace("batch_size=8,", "batch_size=8,\n        scheduler=schedule,") + SCHEDULED
    )
    (home / "a_task.py").write_text(source)
    (home / "data").mkdir()
    (home / "other").mkdir()
    profile = make_machine().save(home / "profile.json")
    plan = Plan(workers=1, threads=1).save(home / "given.json")
    words = ["train", str(home / "a_task.py"), "--machine", str(profile), "--plan", str(plan)]
    assert (
        main([*words, "--data", str(home / "data"), "--epochs", "1", "-o", str(home / "run")]) == 0
    )
    return home


@pytest.fixture
def home(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it whose schedule does not depend on the epochs, as the working directory."""
    place = tmp_path / "home"
    shutil.copytree(finished, place)
    monkeypatch.chdir(place)
    request = TrainRequest.load(place / "run" / "request.json")
    assert request.job.task == str(finished / "a_task.py")
    replace = msgspec.structs.replace
    job = replace(request.job, task=str(place / "a_task.py"), data_dir=str(place / "data"))
    replace(request, job=job).save(place / "run" / "request.json")
    return place


def test_a_refused_resume_leaves_the_request(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workers refuse other epochs; the request of the run stays what it was."""
    before = (home / "run" / "request.json").read_bytes()
    assert main(["train", "a_task.py", "--resume", "-o", "run", "--epochs", "2"]) == 1
    assert "wanted a run of 8 steps, for which its schedule was planned" in capsys.readouterr().err
    assert (home / "run" / "request.json").read_bytes() == before
    assert not (home / "run" / "request.pending.json").exists()


def test_other_data_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though it may be of equal size; the same directory by another name is the same data."""
    words = ["train", "a_task.py", "--resume", "-o", "run", "--epochs", "1"]
    assert main([*words, "--data", "other"]) == 1
    assert capsys.readouterr().err == (
        f"ridgeline: wanted to continue the run in run, which has its data in {home / 'data'}, got --data "
        "other; leave it out, or start another run with -o\n"
    )
    assert main([*words, "--data", "other/../data"]) == 1
    assert "wanted epochs left to train, got all 1 done" in capsys.readouterr().err


def resumed(home: Path, *words: str, workers: int | None = None) -> tuple[Order, list[str]]:
    """What a resumed run is asked for, and what is said of it."""
    parser = argparse.ArgumentParser()
    TrainCommand().prepare_parser(parser)
    args = parser.parse_args(["a_task.py", "--resume", "--epochs", "2", *words])
    said: list[str] = []
    return order_from(args, home / "run", said.append, workers=workers), said


def with_plan(home: Path, plan: Plan) -> None:
    """Have the run in a directory be one of another plan."""
    path = home / "run" / "request.json"
    msgspec.structs.replace(TrainRequest.load(path), plan=plan).save(path)


def test_a_resumed_run_keeps_its_plan(home: Path) -> None:
    """With all that it decided, also where the same numbers are given again."""
    for words in ((), ("--workers", "1"), ("--plan", "given.json")):
        order, said = resumed(home, *words)
        assert order.decided is not None
        assert order.planned == Plan(workers=1, threads=1)
        assert [line.split()[:2] for line in said] == [["going", "on"]]


def test_a_run_is_resumed_by_other_workers(home: Path) -> None:
    """With its plan, but for words that name each of the workers; nothing is searched."""
    rings = Sync(algorithm="rings", options={"orders": "0,1,2:1;0,2,1:1", "pieces": 2}, every=2)
    plan = Plan(workers=3, threads=1, layout=Layout(data=3), sync=rings)
    with_plan(home, plan)
    kept = Sync(algorithm="rings", options={"pieces": 2}, every=2)
    for order, said in (resumed(home, "--workers", "2"), resumed(home, workers=2)):
        assert order.decided is None
        assert order.planned == Plan(workers=2, threads=1, sync=kept)
        assert resumed_wishes(Wishes(), order).plan == order.planned
        _, line = said
        assert line.startswith("continuing with 2 workers x 1 thread, ")
        assert f", where the run in {home / 'run'} had 3 workers x 1 thread, " in line
    order, _ = resumed(home, "--threads", "2")
    assert order.planned == msgspec.structs.replace(plan, threads=2)
    with pytest.raises(PlanError, match=r"its batch size 8 equally, got 5; use --workers 4 or 8$"):
        resumed(home, "--workers", "5")


def test_a_run_is_resumed_with_another_plan(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is predicted anew, and is that of the run from then on."""
    file = home / "a_task.py"
    file.write_text(file.read_text().replace("T_max=steps", "T_max=8"))
    shutil.rmtree(home / "run" / "checkpoints")
    Plan(workers=1, threads=1, accumulate=2).save(home / "other.json")
    words = ["train", "a_task.py", "--resume", "-o", "run", "--machine", "profile.json"]
    assert main([*words, "--plan", "other.json"]) == 0
    assert "continuing with 1 worker x 1 thread, " in capsys.readouterr().err
    for name in ("plan.json", "request.json"):
        kind = Plan if name == "plan.json" else TrainRequest
        found = kind.load(home / "run" / name)
        plan = found if isinstance(found, Plan) else found.plan
        assert plan.settings == Plan(workers=1, threads=1, accumulate=2)


def test_a_plan_needs_no_permissions(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are for the search, which a given plan leaves out."""
    words = ["train", "a_task.py", "--plan", "given.json", "--allow", "bf16", "--allow", "random"]
    assert main([*words, "-o", "new"]) == 1
    assert capsys.readouterr().err == (
        "ridgeline: wanted a plan or permissions for the search of one, got --plan given.json and --allow "
        "bf16, random; give one of them\n"
    )


def test_a_changed_task_and_a_lost_prediction(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed file is said and noted in the report, the plan is that of the run all the same."""
    file = home / "a_task.py"
    file.write_text(file.read_text().replace("T_max=steps", "T_max=8"))
    (home / "run" / "predicted.json").unlink()
    (home / "run" / "plan.json").unlink()
    shutil.rmtree(home / "run" / "checkpoints")
    assert main(["train", "a_task.py", "--resume", "-o", "run", "--machine", "profile.json"]) == 0
    error = capsys.readouterr().err
    changed = (
        f"{file} has changed since the run in run was last started: continuing with it as it is now"
    )
    assert changed in " ".join(error.split())  # long lines are broken at the terminal's width
    assert "no plan.json, predicted.json in run: predicting the plan of that run again" in error
    note = f"{file} was changed before the run was resumed: its parts were trained by other code"
    assert Timeline.load(home / "run" / "measured.json").notes[0] == note
    assert note in Verdict.load(home / "run" / "verdict.json").notes
    assert Plan.load(home / "run" / "plan.json").settings == Plan(workers=1, threads=1).settings
    request = TrainRequest.load(home / "run" / "request.json")
    assert request.resume
    assert request.is_task_changed


def test_a_file_called_like_a_built_in_task_is_not_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever such a file holds, and however it changes, the task is the built-in one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp").write_text("a list of things to do")
    given = {"task": "mlp", "data": None, "batch_size": None, "epochs": None, "seed": None}
    args = argparse.Namespace(**given, resume=False, checkpoint_every=None, allow=[])
    assert order_from(args, tmp_path / "run", lambda line: None).task_digest is None
