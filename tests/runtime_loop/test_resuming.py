"""Resuming: the newest whole checkpoint, the reason of every one passed over, and nobody's files deleted."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import loop_tasks
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_tasks import Ask

from ridgeline.engine import Engine
from ridgeline.errors import CheckpointError
from ridgeline.probe.groups.group import run_in_group
from ridgeline.runtime.checkpoints import checkpoint, checkpoint_directory, resuming
from ridgeline.runtime.checkpoints.checkpoint import DamageError, Position
from ridgeline.runtime.checkpoints.staging import Staging
from ridgeline.runtime.training.saver import Saver
from ridgeline.workers.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))
TENSORS = "model/model-00001-of-00001.safetensors"


def write(directory: Path, step: int) -> Path:
    return checkpoint.write(
        directory,
        Position(epoch=step, step_in_epoch=0, step=step),
        workers=1,
        model={"w": torch.full((3,), float(step))},
        training={"random.0": torch.arange(5, dtype=torch.uint8)},
        state={"note": "x"},
    )


def damage(path: Path, how: str) -> str:
    """Damage a checkpoint; the reason that is told."""
    file = path / TENSORS
    content = bytearray(file.read_bytes())
    if how == "changed":
        content[-1] ^= 1
        file.write_bytes(content)
        return (
            rf"{TENSORS} was changed: wanted SHA-256 [0-9a-f]{{12}}\.\.\., got [0-9a-f]{{12}}\.\.\."
        )
    if how == "cut":
        file.write_bytes(content[:-1])
        return f"{TENSORS}: wanted {len(content)} bytes, got {len(content) - 1}"
    if how == "deleted":
        file.unlink()
        return f"{TENSORS} is missing, wanted {len(content)} bytes"
    if how == "no manifest":
        (path / "manifest.json").unlink()
        return r"manifest\.json is missing"
    if how == "manifest":
        (path / "manifest.json").write_text("{")
        return (
            rf"wanted a checkpoint file, got content that does not fit in {path}/manifest\.json: "
            "Input data was truncated"
        )
    if how == "release":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"version": 1', '"version": 2'))
        return rf"wanted checkpoint version 1, got version 2 in {path}/manifest\.json, written by ridgeline \S+"
    if how in ("further tensors", "further pipe"):
        further = path / "model" / "model-00002-of-00002.safetensors"
        if how == "further pipe":
            os.mkfifo(further)
        else:
            shutil.copy(path.with_name("step-0000001") / TENSORS, further)
        return r"model/model-00002-of-00002\.safetensors does not belong to it"
    if how == "pipe":
        (path / "manifest.json").unlink()
        os.mkfifo(path / "manifest.json")
        return r"manifest\.json is no file"
    assert how == "renamed"
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-0000001"), path)
    return r"manifest\.json is that of step 1"


DAMAGES = [
    *("changed", "cut", "deleted", "no manifest", "manifest", "release", "renamed"),
    *("further tensors", "further pipe", "pipe"),
]


@pytest.mark.parametrize("what", ["a link to nowhere", "a file"])
def test_a_place_that_is_no_directory_is_an_error(tmp_path: Path, what: str) -> None:
    """As where a disk is not mounted: the run would begin anew, though it has checkpoints there."""
    directory = tmp_path / "checkpoints"
    directory.symlink_to("nowhere") if "link" in what else directory.touch()
    with pytest.raises(CheckpointError) as caught:
        resuming.find(directory)
    assert str(caught.value) == (
        f"wanted a directory of checkpoints to continue from, got {what} in {directory}, which is none; mount or "
        "restore what it leads to, or remove it to begin anew"
    )


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_one_is_passed_over_with_its_reason(tmp_path: Path, how: str) -> None:
    """The one before is taken, and both are told."""
    older, newest = write(tmp_path, 1), write(tmp_path, 2)
    reason = damage(newest, how)
    found = resuming.find(tmp_path)
    assert found is not None
    assert found.path == older
    assert found.position.step == 1
    skipped, taken = found.lines
    assert taken == f"going on from {older}"
    prefix = f"skipped {newest}: "
    assert skipped.startswith(prefix)
    assert re.fullmatch(reason, skipped.removeprefix(prefix)), skipped


def test_several_are_passed_over_newest_first(tmp_path: Path) -> None:
    """Each is named; the whole one may be the oldest."""
    paths = [write(tmp_path, step) for step in (1, 2, 10)]
    for path in paths[1:]:
        damage(path, "no manifest")
    found = resuming.find(tmp_path)
    assert found is not None
    assert [*found.skipped] == [paths[2], paths[1]]
    assert found.path == paths[0]


def test_none_whole_is_an_error_and_none_at_all_is_not(tmp_path: Path) -> None:
    """A run that has checkpoints never starts from the beginning silently; remnants are no checkpoints."""
    assert resuming.find(tmp_path / "none") is None
    (tmp_path / ".step-0000001.tmp").mkdir()
    assert resuming.find(tmp_path) is None
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    damage(first, "no manifest")
    size = (second / TENSORS).stat().st_size
    damage(second, "cut")
    with pytest.raises(CheckpointError) as caught:
        resuming.find(tmp_path)
    assert str(caught.value) == (
        f"wanted a whole checkpoint to continue from, got 2 damaged in {tmp_path}: step-0000002: {TENSORS}: "
        f"wanted {size} bytes, got {size - 1}; step-0000001: manifest.json is missing; restore the files of "
        "one, or start again in another run directory"
    )
    assert first.is_dir()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to damage."""
    return write(tmp_path_factory.mktemp("whole"), 7)


@given(data=st.data())
def test_no_damage_gets_through(whole: Path, data: st.DataObject) -> None:
    """Whichever byte of whichever file is other: it is found, or what is read is the same."""
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    before = file.read_bytes()
    changed = bytearray(before)
    changed[data.draw(st.integers(0, len(before) - 1))] = data.draw(st.integers(0, 255))
    wanted = checkpoint.content(whole)
    try:
        file.write_bytes(changed)
        try:
            checkpoint.inspect(whole)
        except DamageError:
            return
        got = checkpoint.content(whole)
    finally:
        file.write_bytes(before)
    assert got[2] == wanted[2]
    for mine, theirs in zip(got[:2], wanted[:2], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_file_that_cannot_be_read_is_a_reason(tmp_path: Path) -> None:
    """What the system refuses is told, not raised."""
    path = write(tmp_path, 1)
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()
    with pytest.raises(DamageError, match=r"^manifest\.json cannot be read: Is a directory$"):
        checkpoint.inspect(path)


def others(path: Path) -> set[str]:
    return {str(inner.relative_to(path)) for inner in path.rglob("*")}


def test_what_a_user_put_there_stays(tmp_path: Path) -> None:
    """Names like those of remnants, links, and checkpoints with a file more are left as they are."""
    write(tmp_path / "elsewhere", 3)
    directory = tmp_path / "checkpoints"
    for step in (1, 2, 5):
        write(directory, step)
    (directory / "step-0000003").symlink_to(tmp_path / "elsewhere" / "step-0000003")
    (directory / "step-0000001" / "why.txt").write_text("the best")
    (directory / "step-0000004" / "mine").mkdir(parents=True)
    for name in (".step-notes.tmp", ".step-0000001.tmp.d", "step-best", ".step-0000009.old"):
        (directory / name).mkdir()
        (directory / name / "mine.txt").write_text("mine")
    (directory / ".step-0000008.tmp").write_text("a file")
    (directory / "step-0000012").write_text("a file")
    before = others(directory)
    checkpoint_directory.tidy(directory, newest=directory / "step-0000005", keep=1)
    removed = before - others(directory)
    assert {name.split("/")[0] for name in removed} == {"step-0000002"}
    assert (tmp_path / "elsewhere" / "step-0000003" / "manifest.json").is_file()


def test_damaged_ones_do_not_count_among_those_kept(tmp_path: Path) -> None:
    """Newer ones that were passed over wait until the run gets there; only whole ones are kept then."""
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    skipped = [tmp_path / f"step-000000{step}" for step in (3, 4, 5)]
    with Engine() as engine:
        saver = Saver(tmp_path, engine, Staging(), keep=2)
        saver.take_up(tmp_path / "step-0000002", skipped)
        saver.finish()
        assert {path.name[-1] for path in tmp_path.iterdir()} == {"1", "2", "3", "4", "5"}
        for step, left in ((3, "2345"), (4, "345"), (6, "46")):
            saver.save(
                Position(epoch=0, step_in_epoch=step, step=step), workers=1,
                tensors={"model.w": torch.zeros(2)}, gathered={}, state={},
            )  # fmt: skip
            saver.finish()
            assert {path.name[-1] for path in tmp_path.iterdir()} == set(left)


def test_what_stands_at_a_checkpoints_place(tmp_path: Path) -> None:
    """A damaged one is replaced; one with a user's file in it is set aside, whole, under the next free name."""
    damage(write(tmp_path, 1), "cut")
    write(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]
    for _ in range(2):
        (tmp_path / "step-0000001" / "mine.txt").write_text("mine")
        write(tmp_path, 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-0000001", "step-0000001.1.kept", "step-0000001.kept"]
    assert all((tmp_path / name / "mine.txt").exists() == (".kept" in name) for name in names)
    checkpoint.read(tmp_path / "step-0000001")


def trained(run_dir: Path, **changes: Any) -> loop_tasks.Told:
    ask = Ask(run_dir=str(run_dir), epochs=2, checkpoint_every=2)
    return loop_tasks.run_here(msgspec.structs.replace(ask, **changes), ALONE)


def test_a_run_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """With the losses of the run that was not disturbed; what was passed over is replaced on the way."""
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "run", stop_at=8)
    directory = tmp_path / "run" / "checkpoints"
    damage(directory / "step-0000006", "changed")
    resumed = trained(tmp_path / "run", resume=True)
    skipped, taken = resumed.said
    assert skipped.startswith(f"skipped {directory / 'step-0000006'}: {TENSORS} was changed: ")
    assert taken == f"going on from {directory / 'step-0000004'}"
    assert msgspec.structs.replace(resumed, said=[]) == whole
    found = resuming.find(directory)
    assert found is not None
    assert not found.skipped


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(tmp_path: Path) -> None:
    """Its loop says so itself, whoever calls it."""
    trained(tmp_path, stop_at=4)
    damage(tmp_path / "checkpoints" / "step-0000002", "cut")
    (error,) = trained(tmp_path, resume=True).errors
    assert error.startswith(
        "CheckpointError: wanted a whole checkpoint to continue from, got 1 damaged in "
    )


def test_two_workers_go_back_together(tmp_path: Path) -> None:
    """Damage in what belongs to rank 1 alone sends both to the checkpoint before, to equal losses."""
    reply = run_in_group(
        "damaged_run:run", str(tmp_path).encode(), workers=2, threads=1, device="cpu"
    )
    whole, resumed, refused = msgspec.json.decode(reply, type=list[loop_tasks.Told])
    directory = tmp_path / "run" / "checkpoints"
    assert resumed.said[0].startswith(f"skipped {directory / 'step-0000006'}: training/")
    assert msgspec.structs.replace(resumed, said=[]) == whole
    first, second = refused.errors
    assert first == second
    assert first.startswith(
        "CheckpointError: wanted a whole checkpoint to continue from, got 3 damaged in "
    )
