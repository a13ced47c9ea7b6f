"""Runs that are killed at one file operation after the other; importable in worker processes."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import loop_tasks
import msgspec
import torch
import torch.distributed as dist
from killing import Disk
from loop_tasks import Ask, Told

from ridgeline.codec import Value
from ridgeline.errors import CheckpointError, EngineError, RidgelineError
from ridgeline.runtime.checkpoints import checkpoint, tensor_files
from ridgeline.runtime.training.saver import Saver
from ridgeline.workers.world import World

WHOLE = Ask(run_dir="whole", epochs=1, checkpoint_every=1)
"""Six steps; what killed runs begin with are the checkpoints of steps 2 to 4."""
KEPT = ["step-0000004", "step-0000005", "step-0000006"]
OTHERS = ["best", "notes.txt", "step-best"]
"""What a user put beside the checkpoints."""


class Ending(Value, frozen=True, kw_only=True):
    """How a run ended that was killed and resumed: what differs from the run that was not."""

    stop: int
    call: str
    was_killed: bool
    wrong: list[str]


@mock.patch.object(
    tensor_files, "FILE_BYTES", 4096
)  # several files in a folder, as large models have
def killed_everywhere(root: Path, world: World) -> list[Ending]:
    """Kill a resumed run at every file operation of rank 0, each time resume it, and compare.

    Args:
        root: An empty directory, the same on all workers.
        world: Of this worker.
    """
    undisturbed = loop_tasks.run_here(_at(WHOLE, root / "whole"), world)
    wanted = _final(root / "whole", undisturbed)
    loop_tasks.run_here(_at(WHOLE, root / "base", stop_at=5), world)
    if world.rank == 0:
        _scatter(root / "base" / "checkpoints")
    calls, _ = _resumed(root, "counted", world, None)
    next_save = next(index for index, call in enumerate(calls) if KEPT[-1] in call)
    endings = []
    for stop, call in enumerate(calls[:next_save]):
        _, was_killed = _resumed(root, "killed", world, stop)
        wrong: list[str] = []
        # A flush changes nothing on this disk: the kill at the next call leaves the same, unless it is half a write.
        if not call.startswith("fsync") or calls[stop + 1].startswith("write"):
            with Disk(root / "killed").patched():
                told = loop_tasks.run_here(_at(WHOLE, root / "killed", resume=True), world)
            if world.rank == 0:
                wrong = _differences(wanted, _final(root / "killed", told))
                wrong += _left(root / "killed" / "checkpoints")
        endings.append(Ending(stop=stop, call=call, was_killed=was_killed, wrong=wrong))
    return endings


def run(request: bytes) -> bytes:
    """`killed_everywhere` on several workers."""
    world = World.join(threads=1, device="cpu")
    return msgspec.json.encode(killed_everywhere(Path(request.decode()), world))


def _at(ask: Ask, run_dir: Path, **changes: Any) -> Ask:
    return msgspec.structs.replace(ask, run_dir=str(run_dir), **changes)


def _resumed(root: Path, name: str, world: World, stop: int | None) -> tuple[list[str], bool]:
    """A copy of the base run, resumed and killed: the file operations before, and whether it was."""
    copy = root / name
    if world.rank == 0:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root / "base", copy)
    if world.size > 1:
        dist.barrier()
    disk = Disk(copy / "checkpoints", stop if world.rank == 0 else None)
    with disk.patched(), mock.patch.object(Saver, "finish", _finish), suppress(RidgelineError):
        loop_tasks.train_here(_at(WHOLE, copy, resume=True), world)
    # Rank 0 alone writes, so that the others go by its list.
    return _of_rank_0([*disk.log], world), disk.is_dead


_wait = Saver.finish


def _finish(saver: Saver) -> None:
    """Let all workers end when rank 0 is dead, as they do when a write fails: they must live on for the next."""
    try:
        _wait(saver)
    except EngineError:
        saver.failure = CheckpointError("killed")
        raise saver.failure from None


def _of_rank_0(value: list[str], world: World) -> list[str]:
    if world.size == 1:
        return value
    shared: list[Any] = [value]
    dist.broadcast_object_list(shared)
    return list(shared[0])


def _scatter(checkpoints: Path) -> None:
    """Remnants of every kind, and what a user put there."""
    for name in (".step-0000003.tmp", ".step-0000001.old"):
        shutil.copytree(checkpoints / "step-0000004", checkpoints / name)
    (checkpoints / ".step-0000001.old" / "state.json").unlink()
    shutil.copytree(checkpoints / "step-0000004", checkpoints / "step-0000001")
    (checkpoints / "step-0000001" / "manifest.json").unlink()
    (checkpoints / "notes.txt").write_text("mine")
    for name in ("best", "step-best"):
        shutil.copytree(checkpoints / "step-0000004", checkpoints / name)


def _left(checkpoints: Path) -> list[str]:
    """What is there and should not be, and the reverse."""
    there = {path.name for path in checkpoints.iterdir()}
    return [f"{name} in the directory" for name in sorted(there ^ {*KEPT, *OTHERS})]


def _final(run_dir: Path, told: Told) -> dict[str, Any]:
    """Everything that two runs must have in common."""
    _, model, training, state = checkpoint.read(run_dir / "checkpoints" / KEPT[-1])
    state = {name: value for name, value in state.items() if name != "course"}  # it holds times
    return {"told": msgspec.structs.replace(told, said=[]), **state, **model, **training}


def _differences(wanted: dict[str, Any], got: dict[str, Any]) -> list[str]:
    return [
        name
        for name in sorted(wanted.keys() | got.keys())
        if not _same(wanted.get(name), got.get(name))
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
