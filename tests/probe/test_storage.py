"""A scratch file: nothing of it stays, what is read is what was written, and faults are told."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ridgeline.errors import MachineError
from ridgeline.probe.files import storage
from ridgeline.probe.files.blocks import pages
from ridgeline.probe.files.storage import BLOCK_BYTES, NUM_PIECES, PIECE_BYTES, Scratch, shown


def handles() -> set[str]:
    """The files that this process has open."""
    return {name.name for name in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that allows no direct I/O."""
    opened = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)


def test_no_name_leads_to_the_file(tmp_path: Path) -> None:
    """Whoever ends this process, however hard, leaves nothing behind; its handles are closed."""
    before = handles()
    with Scratch(tmp_path) as scratch:
        assert list(tmp_path.iterdir()) == []
        assert len(scratch.write(2 * PIECE_BYTES)) == 2
        assert scratch.num_bytes == os.fstat(scratch._cached).st_size == 2 * PIECE_BYTES
        scratch.append(3)
        assert os.fstat(scratch._cached).st_size == 2 * PIECE_BYTES + 3 * BLOCK_BYTES
        assert list(tmp_path.iterdir()) == []
    assert handles() == before


@pytest.fixture
def places(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[tuple[int, int]]:
    """Sizes and places of the blocks that are read; each is what was written there."""
    found: list[tuple[int, int]] = []
    name = "_read_compiled" if request.param else "_read"
    read = getattr(Scratch, name)

    def noted(self: Scratch, memory: memoryview, given: Any, *rest: float) -> object:
        many = given if request.param else [given]
        done = read(self, memory, given, *rest)
        assert memory[:] == os.pread(self._cached, len(memory), many[-1])
        found.extend((len(memory), place) for place in many)
        return done

    monkeypatch.setattr(Scratch, name, noted)
    if not request.param:
        monkeypatch.setattr(storage, "storage_library", no_compiler)
    return found


def no_compiler() -> None:
    raise MachineError("wanted a C compiler, got none")


@pytest.mark.parametrize("places", [True, False], ids=["C", "Python"], indirect=True)
def test_what_is_written_is_noise_and_is_read(
    tmp_path: Path, places: list[tuple[int, int]], request: pytest.FixtureRequest
) -> None:
    """Pieces differ within sixteen; threads that read in order divide the pieces, those at random stay inside."""
    with Scratch(tmp_path) as scratch:
        assert scratch.is_compiled == ("[C]" in request.node.name)
        scratch.write((NUM_PIECES + 1) * PIECE_BYTES)
        pieces = [os.pread(scratch._cached, PIECE_BYTES, n * PIECE_BYTES) for n in range(17)]
        assert len(set(pieces)) == NUM_PIECES
        assert pieces[0] == pieces[NUM_PIECES]
        assert all(len(set(piece)) == 256 for piece in pieces)
        assert len(scratch.read(2, most=9)) == 18
        order = sorted(place // PIECE_BYTES for _, place in places)
        assert order == sorted([0, *range(17)])  # after the last the first again
        assert {size for size, _ in places} == {PIECE_BYTES}
        places.clear()
        spans = scratch.read_at_random(3, most=100)
        assert len(spans) == 300
        assert all(span.begun_s < span.ended_s for span in spans)
    assert {size for size, _ in places} == {BLOCK_BYTES}
    assert all(place % BLOCK_BYTES == 0 for _, place in places)
    assert len({place for _, place in places}) > 270
    assert PIECE_BYTES < max(place for _, place in places) < 17 * PIECE_BYTES


def test_reads_in_c_tell_their_errors_and_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the end there is nothing; with no time left there is one block."""
    with Scratch(tmp_path) as scratch, pages(BLOCK_BYTES) as memory:
        scratch.write(PIECE_BYTES)
        times = scratch._read_compiled(memory, [0, BLOCK_BYTES, 0], 60.0)
        assert times == sorted(times)
        assert len(times) == 6
        assert len(scratch._read_compiled(memory, [0] * 100, -1.0)) == 2
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            scratch._read_compiled(memory, [0, PIECE_BYTES], 60.0)
        with monkeypatch.context() as patch:
            patch.setattr(scratch, "_direct", 1 << 20)
            with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
                scratch._read_compiled(memory, [0], 60.0)


@pytest.mark.usefixtures("no_direct")
def test_without_direct_reads_the_cache_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so; what is written waits for the drive after every sixteen pieces, and at the end."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Scratch(tmp_path) as scratch:
        assert not scratch.is_direct
        scratch.write(40 * PIECE_BYTES)
        assert len(synced) == 40 // NUM_PIECES + 1
        assert len(scratch.read(most=3)) == 3


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_first_block_that_is_refused_counts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Some file systems open a file directly and then refuse to write it so."""
    before = handles()

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    with Scratch(tmp_path) as scratch:
        assert not scratch.is_direct
    assert handles() == before


def test_another_fault_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No handle and no file stays."""
    before = handles()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "drive")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="drive"):
        Scratch(tmp_path)
    assert handles() == before
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that was written in part is no piece."""
    written = os.pwrite
    with Scratch(tmp_path) as scratch:
        monkeypatch.setattr(os, "pwrite", lambda file, part, place: written(file, part, place) - 1)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            scratch.write(PIECE_BYTES)


def test_a_folder_is_shown_without_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is below the user's home begins with a tilde."""
    monkeypatch.setenv("HOME", "/home/somebody")
    assert shown(Path("/home/somebody/runs")) == "~/runs"
    assert shown(Path("/scratch/runs")) == "/scratch/runs"
    assert storage.shown(Path("/home/somebody")) == "~/."

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert shown(Path("/home/somebody/runs")) == "/home/somebody/runs"
