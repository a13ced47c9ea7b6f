"""A run is continued with what it was begun with; anything else is refused by name, before a step is taken."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loop_tasks
import pytest
import torch
from loop_tasks import StopHereError
from torch import Tensor, nn

from ridgeline.errors import CheckpointError
from ridgeline.plan import Plan
from ridgeline.runtime.checkpoints import checkpoint_directory
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.task import Task
from ridgeline.workers.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))
STATE = "state.json"


def run(run_dir: Path, task: Task, *, stop_at: int | None = None, resume: bool = False) -> None:
    """Two epochs of six steps, stopped in one of them."""
    steps = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == stop_at:
            raise StopHereError
        return task.loss_fn(model, batch)

    stopping = dataclasses.replace(task, loss_fn=loss_fn)
    try:
        train(stopping, Plan(), ALONE, run_dir=run_dir, epochs=2, resume=resume, checkpoint_every=2)
    except StopHereError:
        assert stop_at is not None


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was stopped in its eighth step."""
    run_dir = tmp_path_factory.mktemp("stopped")
    run(run_dir, loop_tasks.task(), stop_at=8)
    return run_dir


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


OTHERS: list[tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], str]] = [
    (lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), "SGD as optimizer, got a checkpoint with AdamW"),
    (lambda p: torch.optim.Adam(p, 0.05), "Adam as optimizer, got a checkpoint with AdamW"),
    (lambda p: torch.optim.AdamW(p, 0.5), "0.5 as lr of the optimizer, got a checkpoint with 0.05"),
    (
        lambda p: torch.optim.AdamW(p, 0.05, amsgrad=True),
        "True as amsgrad of the optimizer, got a checkpoint with False",
    ),
    (
        lambda p: torch.optim.AdamW(p, 0.05, betas=(0.8, 0.999)),
        "(0.8, 0.999) as betas of the optimizer, got a checkpoint with (0.9, 0.999)",
    ),
    (
        lambda p: torch.optim.AdamW(p[::-1], 0.05),
        "layers.4.bias as parameter 0 of the optimizer, got a checkpoint with layers.0.weight",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("other", "said"), OTHERS)
def test_another_optimizer_is_refused(
    stopped: Path, other: Callable[[list[nn.Parameter]], torch.optim.Optimizer], said: str
) -> None:
    """Loading its state would succeed: another rate would be ignored, another class fail at its first step."""
    task = dataclasses.replace(loop_tasks.task(), optimizer=lambda model: other(trainable(model)))
    newest = checkpoint_directory.latest(stopped / "checkpoints")
    with pytest.raises(CheckpointError) as caught:
        run(stopped, task, resume=True)
    assert str(caught.value) == (
        f"wanted to continue with {said} in {newest}; continue with the task as it was, or train into another run "
        "directory"
    )


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_another_form_of_the_same_update_is_the_same_optimizer(
    stopped: Path, tmp_path: Path, form: str
) -> None:
    """How it is computed is no part of the run: that of the task stays in force, not that of the checkpoint."""
    shutil.copytree(stopped, tmp_path / "run")
    made: list[torch.optim.Optimizer] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(trainable(model), 0.05, **{form: True}))
        return made[0]

    run(tmp_path / "run", dataclasses.replace(loop_tasks.task(), optimizer=optimizer), resume=True)
    assert [group[form] for group in made[0].param_groups] == [True]


def test_another_precision_is_refused(stopped: Path) -> None:
    """Loading would round every value, or widen what was rounded."""
    task = dataclasses.replace(loop_tasks.task(), model=lambda: loop_tasks.Net().double())
    with pytest.raises(
        CheckpointError,
        match=r"^wanted to continue with float64 as dtype of layers\.0\.weight, got a checkpoint with float32 in ",
    ):
        run(stopped, task, resume=True)


EDITS: list[Callable[[dict[str, Any]], object]] = [
    lambda state: state.pop("identity"),
    lambda state: state.update(identity=5),
    lambda state: state.update(made=[]),
    lambda state: state.update(model=5),
    lambda state: state.update(scheduler=5),
    lambda state: state.update(course={"position": []}),
    lambda state: state["model"].update({"layers.0.weight": {"$tensor": []}}),
    lambda state: state["model"].update({"layers.0.weight": {"$tuple": 5}}),
    lambda state: state["optimizer"].update(state={"$items": [1]}),
]


def reseal(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's state, and its manifest so that checksums are right."""
    noun = json.loads((checkpoint / STATE).read_text())
    del noun["sha256"]
    edit(noun["value"]["state"])
    content = json.dumps(noun).encode()
    (checkpoint / STATE).write_bytes(content)
    manifest = json.loads((checkpoint / checkpoint_directory.MANIFEST).read_text())
    del manifest["sha256"]
    (entry,) = [file for file in manifest["value"]["files"] if file["path"] == STATE]
    entry.update(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (checkpoint / checkpoint_directory.MANIFEST).write_text(json.dumps(manifest))


def test_gradients_may_be_clipped_otherwise(stopped: Path, tmp_path: Path) -> None:
    """As a loss that is not finite advises; a rate is part of what the optimizer remembers, and is not changed."""
    shutil.copytree(stopped, tmp_path / "run")
    run(tmp_path / "run", dataclasses.replace(loop_tasks.task(), clip_norm=0.5), resume=True)


@pytest.mark.parametrize("edit", EDITS)
def test_a_state_of_another_form_is_refused(
    stopped: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    """Written by something else, with checksums that are right: an error of ours, with the file."""
    shutil.copytree(stopped, tmp_path / "run")
    newest = checkpoint_directory.latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    reseal(newest, edit)
    text = f"^wanted a checkpoint that fits the task, got a mismatch in {newest}: .*; continue with the task as it was"
    with pytest.raises(CheckpointError, match=text):
        run(tmp_path / "run", loop_tasks.task(), resume=True)


def test_a_state_of_another_position_is_refused(stopped: Path, tmp_path: Path) -> None:
    """Checksums are of what was sealed last; the manifest and the state say both where the run continues."""
    shutil.copytree(stopped, tmp_path / "run")
    newest = checkpoint_directory.latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    reseal(newest, lambda state: state["course"]["position"].update(step_in_epoch=5, step=5))
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path / "run", loop_tasks.task(), resume=True)
    assert str(caught.value) == (
        "wanted a state of the position that its manifest names, Position(epoch=1, step_in_epoch=0, step=6), got "
        f"one of Position(epoch=1, step_in_epoch=5, step=5) in {newest}; put the file back that was written with "
        "it, or remove this checkpoint: --resume continues from the one before"
    )
