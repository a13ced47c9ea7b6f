"""How fast files are written and read: which ways are timed, and the profile with their figures."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.errors import MachineError
from ridgeline.machine import Machine
from ridgeline.machine.storage import Access, Operation, Storage, described
from ridgeline.probe.fields import forgotten, warned
from ridgeline.probe.files.blocks import BlockSpan, rate_of, seconds_of
from ridgeline.probe.files.storage import BLOCK_BYTES, PIECE_BYTES, Scratch, shown
from ridgeline.probe.host.mounts import mount_of
from ridgeline.probe.host.staircase import room_bytes

MOST_OF_FREE = 0.25
"""Share of the free space that the file may take."""
MOST_BYTES, LEAST_BYTES = 1 << 30, 16 << 20
APPENDED = 1024
"""Blocks that are appended at most; the file leaves room for them."""
WRITE_S = 5.0
"""A drive that writes slower than 200 MB/s gets a smaller file."""
PREFIX = "no figures of storage: "
NEXT = "run `ridgeline measure --full` in a directory where runs could be written"


class AccessTrial(NamedTuple):
    """One way of access: what `Access` says of it, and how long it is tried."""

    operation: Operation
    block_bytes: int
    depth: int
    limit_s: float


WAYS = (
    AccessTrial("write", PIECE_BYTES, 1, WRITE_S),
    AccessTrial("synced append", BLOCK_BYTES, 1, 1.5),
    AccessTrial("read", PIECE_BYTES, 1, 2.0),
    AccessTrial("read", PIECE_BYTES, 4, 2.0),
    AccessTrial("read at random", BLOCK_BYTES, 1, 2.0),
    AccessTrial("read at random", BLOCK_BYTES, 4, 2.0),
    AccessTrial("read at random", BLOCK_BYTES, 16, 2.0),
)
"""The first also makes the file that the others use."""


def with_storage(
    machine: Machine,
    keep: Callable[[Machine], Machine],
    say: Callable[[str], None],
    folder: Path | None = None,
) -> Machine:
    """The profile with each way of access that it lacks for a folder's file system, kept after each.

    Args:
        machine: What is known of this host; figures of other file systems stay.
        keep: See `fields.with_fields`.
        say: Takes a line before each way.
        folder: Where files are written. None: the current directory, below which runs are written.

    Cost: up to 20 s, and for so long a quarter of the free space, at most 1 GiB. Where no file can be
        written, or there is no room, a warning says so.
    """
    folder = (folder or Path.cwd()).resolve()
    machine = forgotten(machine, PREFIX)
    mount = mount_of(folder)
    here = (str(mount.point), mount.kind)
    # By file system, as a folder elsewhere on it has the same drive.
    others = tuple(one for one in machine.storage if (one.mount, one.kind) != here)
    known = next((one for one in machine.storage if (one.mount, one.kind) == here), None)
    storage = known or Storage(folder=shown(folder), mount=here[0], kind=here[1])
    tried = {(one.operation, one.block_bytes, one.depth) for one in storage.accesses}
    missing = [way for way in WAYS if way[:3] not in tried]
    if not missing:
        return machine
    try:
        with Scratch(folder) as scratch:
            most = room(folder, is_direct=scratch.is_direct)
            # The file of the measurement before went with its process.
            if WAYS[0] not in missing:
                say(f"storage: writing the file in {shown(folder)} again")
                scratch.write(min(storage.file_bytes, most), WRITE_S)
            for number, way in enumerate(missing, 1):
                what = described(way.operation, way.block_bytes, way.depth)
                say(f"storage: {what}, in {shown(folder)} ({number} of {len(missing)})")
                spans = _spans(scratch, way, most)
                storage = _with(storage, way, spans, scratch)
                machine = keep(msgspec.structs.replace(machine, storage=(*others, storage)))
    except (OSError, MachineError) as error:
        reason = str(error) if isinstance(error, MachineError) else _refusal(folder, error)
        return warned(machine, f"{PREFIX}{reason}")
    return machine


def room(folder: Path, *, is_direct: bool) -> int:
    """Bytes of the file: within a quarter of the free space and, where it fills a cache, of free memory.

    Raises:
        MachineError: that is too little to time anything with.
    """
    free = int(MOST_OF_FREE * shutil.disk_usage(folder).free)
    most = min(free, MOST_BYTES, MOST_BYTES if is_direct else room_bytes())
    if most < LEAST_BYTES:
        raise MachineError(
            f"wanted a file of {units.num_bytes(LEAST_BYTES)} at least, got room for {units.num_bytes(most)} "
            f"in a quarter of what is free in {shown(folder)}; {NEXT}"
        )
    return most - most % PIECE_BYTES


def _refusal(folder: Path, error: OSError) -> str:
    return f"wanted to write and read a file in {shown(folder)}, got: {error.strerror or error}; {NEXT}"


def _spans(scratch: Scratch, way: AccessTrial, most_bytes: int) -> list[BlockSpan]:
    """What each block took that way."""
    match way.operation:
        case "write":
            # Less what is appended later, or that would be the first to meet a full drive.
            return scratch.write(most_bytes - APPENDED * BLOCK_BYTES, way.limit_s)
        case "synced append":
            return scratch.append(APPENDED, way.limit_s)
        case "read":
            return scratch.read(way.depth, way.limit_s)
        case "read at random":
            return scratch.read_at_random(way.depth, way.limit_s)


def _with(storage: Storage, way: AccessTrial, spans: list[BlockSpan], scratch: Scratch) -> Storage:
    access = Access(
        operation=way.operation,
        block_bytes=way.block_bytes,
        depth=way.depth,
        seconds=seconds_of(spans),
        rate=rate_of(spans, way.block_bytes),
    )
    return msgspec.structs.replace(
        storage,
        is_direct=scratch.is_direct,
        is_compiled=scratch.is_compiled,
        file_bytes=scratch.num_bytes,
        accesses=(*storage.accesses, access),
    )
