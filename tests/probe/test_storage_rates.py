"""Storage of a profile: each way once, kept as it comes, one entry for each file system."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import MachineError
from ridgeline.machine import Machine
from ridgeline.machine.storage import Access, Storage
from ridgeline.probe.files import storage_rates
from ridgeline.probe.files.blocks import BlockSpan
from ridgeline.probe.files.storage import PIECE_BYTES, Scratch
from ridgeline.probe.files.storage_rates import WAYS, room, with_storage
from ridgeline.probe.host.mounts import Mount
from strategies import make_machine, measured

Usage = namedtuple("Usage", "total used free")  # noqa: PYI024 - as shutil's own
ALL = [(way.operation, way.block_bytes, way.depth) for way in WAYS]
SPANS = [BlockSpan(0.0, 1.0), BlockSpan(1.0, 2.0)]


def ways_of(machine: Machine) -> list[tuple[str, int, int]]:
    (one,) = machine.storage
    return [(access.operation, access.block_bytes, access.depth) for access in one.accesses]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int]]:
    """What a scratch file is asked for, by stand-ins; writing it takes its bytes."""
    asked: list[tuple[str, int]] = []

    def write(self: Scratch, num_bytes: int, limit_s: float) -> list[BlockSpan]:
        asked.append(("write", num_bytes))
        self.num_bytes = num_bytes
        return SPANS

    def append(self: Scratch, most: int, limit_s: float) -> list[BlockSpan]:
        asked.append(("synced append", 1))
        return SPANS

    def read(self: Scratch, depth: int, limit_s: float) -> list[BlockSpan]:
        asked.append(("read", depth))
        return SPANS

    def read_at_random(self: Scratch, depth: int, limit_s: float) -> list[BlockSpan]:
        asked.append(("read at random", depth))
        return SPANS

    for act in (write, append, read, read_at_random):
        monkeypatch.setattr(Scratch, act.__name__, act)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 256 << 20))
    monkeypatch.setattr(storage_rates, "mount_of", lambda folder: Mount(Path("/data"), "ext4"))
    return asked


def test_all_ways_in_one_file(tried: list[tuple[str, int]], tmp_path: Path) -> None:
    """It takes a quarter of the free space, with what is appended; a line comes before each way."""
    lines: list[str] = []
    found = with_storage(make_machine(), lambda one: one, lines.append, tmp_path)
    assert ways_of(found) == ALL
    assert tried[0] == ("write", 60 << 20)
    assert tried[1:] == [(way.operation, way.depth) for way in WAYS[1:]]
    assert lines[0] == f"storage: write of 1.00 MiB in order, in {tmp_path} (1 of 7)"
    assert lines[-1] == f"storage: read of 4.00 KiB at random, 16 at once, in {tmp_path} (7 of 7)"
    (one,) = found.storage
    assert (one.folder, one.mount, one.kind) == (str(tmp_path), "/data", "ext4")
    assert one.file_bytes == 60 << 20
    assert {access.rate.value / access.block_bytes for access in one.accesses} == {1.0}


def test_an_interrupted_one_goes_on(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was found until then is in the file; the next writes as much again and takes the rest alone."""
    path, lines = tmp_path / "machine.json", []

    def keep(machine: Machine) -> Machine:
        machine.save(path)
        return machine

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_storage(make_machine(), keep, interrupt, tmp_path)
    kept = Machine.load(path)
    assert ways_of(kept) == ALL[:3]
    tried.clear()
    lines.clear()
    kept = msgspec.structs.replace(
        kept, storage=(msgspec.structs.replace(kept.storage[0], folder="/data/elsewhere"),)
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 200 << 20))
    whole = with_storage(kept, keep, lines.append, tmp_path)
    assert ways_of(whole) == ALL
    assert tried == [("write", 50 << 20), *((way.operation, way.depth) for way in WAYS[3:])]
    assert lines[0] == f"storage: writing the file in {tmp_path} again"
    assert lines[1] == f"storage: read of 1.00 MiB in order, 4 at once, in {tmp_path} (1 of 4)"
    assert whole == Machine.load(path)
    tried.clear()
    assert with_storage(whole, keep, lines.append, tmp_path) == whole
    assert tried == []
    assert [one.name for one in tmp_path.iterdir()] == ["machine.json"]


def test_each_file_system_has_its_figures(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another directory of the same one is known; one of another is measured, and the first stays."""
    first = with_storage(make_machine(), lambda one: one, print, tmp_path)
    (tmp_path / "below").mkdir()
    assert with_storage(first, lambda one: one, print, tmp_path / "below") == first
    monkeypatch.setattr(storage_rates, "mount_of", lambda folder: Mount(Path("/home"), "nfs4"))
    both = with_storage(first, lambda one: one, print, tmp_path)
    assert [one.mount for one in both.storage] == ["/data", "/home"]
    assert both.storage[0] == first.storage[0]


def test_the_current_directory_is_what_is_measured(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs are written below it."""
    monkeypatch.chdir(tmp_path)
    (one,) = with_storage(make_machine(), lambda one: one, print).storage
    assert one.folder == str(tmp_path)


def test_a_directory_that_takes_no_file(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A warning says so, once, and goes when there are figures; the rest of the profile stays."""
    machine = make_machine()
    refused = with_storage(machine, lambda one: one, print, tmp_path / "none")
    warning = (
        f"no figures of storage: wanted to write and read a file in {tmp_path / 'none'}, got: No such file "
        "or directory; run `ridgeline measure --full` in a directory where runs could be written"
    )
    assert refused.warnings == (*machine.warnings, warning)
    assert with_storage(refused, lambda one: one, print, tmp_path / "none") == refused
    assert msgspec.structs.replace(refused, warnings=machine.warnings) == machine
    assert with_storage(refused, lambda one: one, print, tmp_path).warnings == machine.warnings


def test_what_was_found_before_a_fault_stays(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A drive that fails costs the ways that are left, with a warning, and not the profile."""

    def fail(*_: object) -> list[BlockSpan]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Scratch, "read_at_random", fail)
    found = with_storage(make_machine(), lambda one: one, print, tmp_path)
    assert ways_of(found) == ALL[:4]
    assert "got: Input/output error; run" in found.warnings[-1]


@given(st.integers(0, 1 << 36), st.integers(0, 1 << 36), st.booleans())
def test_room_is_within_a_quarter(free: int, memory: int, is_direct: bool) -> None:
    """Whole pieces, within a quarter of what is free, 1 GiB, and of memory where a cache is filled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, free))
        patch.setattr(storage_rates, "room_bytes", lambda: memory)
        most = min(free // 4, 1 << 30, 1 << 30 if is_direct else memory)
        if most >= 16 << 20:
            size = room(Path("/"), is_direct=is_direct)
            assert most - PIECE_BYTES < size <= most
            assert size % PIECE_BYTES == 0
        else:
            with pytest.raises(MachineError, match="in a quarter of what is free in /; run"):
                room(Path("/"), is_direct=is_direct)


def test_a_full_drive_is_left_alone(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is written where a quarter of the free space is too little."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 12 << 20))
    found = with_storage(make_machine(), lambda one: one, print, tmp_path)
    assert found.warnings[-1] == (
        "no figures of storage: wanted a file of 16.0 MiB at least, got room for 3.00 MiB in a quarter of "
        f"what is free in {tmp_path}; run `ridgeline measure --full` in a directory where runs could be "
        "written"
    )
    assert tried == []


def test_what_figures_mean() -> None:
    """Past the cache, through it, or of memory alone."""

    def meaning(kind: str, is_direct: bool, is_compiled: bool = True) -> str:
        return Storage(
            folder="/a", mount="/", kind=kind, is_direct=is_direct, is_compiled=is_compiled
        ).meaning

    assert meaning("ext4", True) == "direct: past the system's cache of files"
    assert meaning("ext4", True, False) == (
        "direct: past the system's cache of files; issued by Python, as there is no C compiler: many at "
        "once wait for each other"
    )
    assert meaning("fuse", False) == (
        "fuse allows no direct I/O: reads come from the system's cache of files, so their figures are those "
        "of memory; writes go through it, and wait for the drive every 16 MiB"
    )
    memory = "tmpfs keeps files in memory: these are figures of memory, not of a drive"
    assert meaning("tmpfs", True) == meaning("tmpfs", False) == memory


def test_names_of_ways() -> None:
    """Block, order, and how many at once; blocks a second are the rate over their size."""
    access = Access(
        operation="read at random",
        block_bytes=4096,
        depth=16,
        seconds=measured(1e-4, "s"),
        rate=measured(409.6e6, "B/s"),
    )
    assert access.name == "read of 4.00 KiB at random, 16 at once"
    assert access.blocks_per_s == 1e5
    named = [
        msgspec.structs.replace(access, operation=way.operation, depth=1).name for way in WAYS[:3]
    ]
    assert named == [
        "write of 4.00 KiB in order",
        "append of 4.00 KiB, each with fsync",
        "read of 4.00 KiB in order",
    ]
