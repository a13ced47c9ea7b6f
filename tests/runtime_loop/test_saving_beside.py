"""Checkpoints written beside training: the state of their step, one at a time, and no failure lost."""

import dataclasses
import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import loop_tasks
import msgspec
import pytest
import safetensors.torch
import torch
from loop_tasks import Told

from ridgeline.errors import CheckpointError
from ridgeline.plan import Plan
from ridgeline.probe.groups.group import run_in_group
from ridgeline.runtime.checkpoints import checkpoint, checkpoint_directory
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.saver import Saver
from ridgeline.workers.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))
LONG_S = 60.0
"""Until a test that waits in vain ends."""


def trained(run_dir: Path, at_step: Callable[[int], None] = lambda _: None) -> None:
    """Six steps, with a checkpoint after every second one; told of each step when it begins."""
    calls = 0

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        at_step(calls)
        return loop_tasks.loss_fn(model, batch)

    task = dataclasses.replace(loop_tasks.task(), loss_fn=loss_fn)
    train(task, Plan(), ALONE, run_dir=run_dir, epochs=1, seed=5, checkpoint_every=2)


class Writer:
    """Stands for a slow disk: a checkpoint is written once somebody allows it.

    Args:
        failure: Raised instead of the writing; None writes.
    """

    def __init__(self, failure: Exception | None = None) -> None:
        self.log: list[str] = []
        self.may_write = threading.Semaphore(0)
        self._failure = failure
        self._write = checkpoint.write

    def __call__(self, directory: Path, position: checkpoint.Position, **rest: Any) -> Path:
        self.log.append(f"begin {position.step}")
        assert self.may_write.acquire(timeout=LONG_S)
        if self._failure is not None:
            raise self._failure
        path = self._write(directory, position, **rest)
        self.log.append(f"end {position.step}")
        return path

    def patched(self) -> Any:
        return mock.patch.object(checkpoint, "write", self)


def saved(run_dir: Path) -> dict[str, list[Any]]:
    """Every tensor of every checkpoint, by file and name: dtype, shape and bits."""
    root = run_dir / "checkpoints"
    return {  # not whole files: the order in their headers is another in every process
        f"{path.relative_to(root)}: {name}": [
            t.dtype,
            t.shape,
            t.flatten().view(torch.uint8).tolist(),
        ]
        for path in root.rglob("*.safetensors")
        for name, t in safetensors.torch.load_file(path).items()
    }


def test_training_goes_on_and_the_bits_are_those_of_the_step(tmp_path: Path) -> None:
    """A checkpoint has the bits of one for which training waited, though a step was taken meanwhile."""
    save = Saver.save

    def save_and_wait(saver: Saver, *args: Any, **rest: Any) -> None:
        save(saver, *args, **rest)
        saver.finish()

    with mock.patch.object(Saver, "save", save_and_wait):
        trained(tmp_path / "waited")
    writer = Writer()

    def at_step(step: int) -> None:
        writer.log.append(f"step {step}")
        if step == 4:  # one step is taken since the first checkpoint was begun
            writer.may_write.release()
        if step == 6:  # likewise; and the last one is waited for
            writer.may_write.release(2)

    with writer.patched():
        trained(tmp_path / "beside", at_step)
    assert saved(tmp_path / "beside") == saved(tmp_path / "waited")
    assert len({name.split("/")[0] for name in saved(tmp_path / "beside")}) == 3
    order = [word for word in writer.log if not word.startswith("step")]
    assert order == [f"{what} {step}" for step in (2, 4, 6) for what in ("begin", "end")]
    assert writer.log.index("end 2") > writer.log.index("step 4")
    assert writer.log.index("end 4") > writer.log.index("step 6")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_what_ends_a_run_waits_for_its_checkpoint(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    """Ctrl-C and errors of a script leave a whole checkpoint, and no part of one."""
    writer = Writer()

    def at_step(step: int) -> None:
        if step == 3:
            writer.may_write.release()
            raise kind

    with writer.patched(), pytest.raises(kind) as caught:
        trained(tmp_path, at_step)
    assert writer.log == ["begin 2", "end 2"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000002"]
    checkpoint.read(tmp_path / "checkpoints" / "step-0000002")
    assert not hasattr(caught.value, "__notes__")


def test_what_ends_a_run_tells_of_its_checkpoint(tmp_path: Path) -> None:
    """Where it cannot be written while a run ends for another reason, that is noted there."""
    writer = Writer(CheckpointError("wanted room, got none"))

    def at_step(step: int) -> None:
        if step == 3:
            writer.may_write.release()
            raise ValueError("of the script")

    with writer.patched(), pytest.raises(ValueError, match="of the script") as caught:
        trained(tmp_path, at_step)
    assert caught.value.__notes__ == ["wanted room, got none"]


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    """With the message of who writes; the checkpoint before stays, and nothing else."""
    flush = os.fsync
    written = checkpoint_directory.checkpoint_of(tmp_path / "checkpoints", 2)

    def fsync(handle: int) -> None:
        if (written.parent / ".step-0000004.tmp").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    with mock.patch.object(os, "fsync", fsync), pytest.raises(CheckpointError) as caught:
        trained(tmp_path)
    assert re.fullmatch(
        rf"wanted to write the checkpoint {tmp_path}/checkpoints/step-0000004 \(\S+ KiB\), got No space left on "
        r"device with \S+ \S+ free; the previous checkpoint is untouched: make room there, or copy the run to "
        r"another disk and name the copy with -o, and continue with --resume",
        str(caught.value),
    ), str(caught.value)
    assert not hasattr(caught.value, "__notes__")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000002"]
    checkpoint.read(written)


def test_whatever_fails_in_writing_ends_all_workers(tmp_path: Path) -> None:
    """Also what nobody expects there, with one message, as a full disk does."""
    reply = run_in_group(
        "failing_writer:run", str(tmp_path).encode(), workers=2, threads=1, device="cpu"
    )
    wanted = (
        f"CheckpointError: wanted to write a checkpoint into {tmp_path}/checkpoints, got MemoryError: out of it; "
        "the previous checkpoint is untouched: fix it and continue with --resume"
    )
    assert msgspec.json.decode(reply, type=Told).errors == [wanted, wanted]
