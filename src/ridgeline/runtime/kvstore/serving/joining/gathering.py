"""How the workers of a job come to have servers.

Some start one, and all learn where these are, or what went wrong for any of them.
"""

import itertools
import math
import secrets
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.addressing.addresses import (
    LOOPBACK,
    check_listening,
    check_published,
    host_identity,
    is_loopback,
    reached_by_all,
    told_by_all,
)
from ridgeline.runtime.kvstore.serving.addressing.epochs import Notice, own_store
from ridgeline.runtime.kvstore.serving.addressing.keys import (
    Keys,
    named_directory,
    read_keys,
)
from ridgeline.runtime.kvstore.serving.joining.beside import ServerBeside
from ridgeline.runtime.kvstore.serving.joining.members import (
    Members,
    StoreRecord,
    found,
    founded,
    root_store,
)
from ridgeline.workers.world import World

_numbers = itertools.count()
"""Of the stores that this process has made: all workers make theirs in the same order."""


class Wanted(NamedTuple):
    """What a caller says of servers: the arguments of `kinds.create`, and their defaults."""

    num_servers: int = 0
    staleness: int | None = None
    module: str = ""
    address: str = ""
    keys: str = ""
    snapshots: str = ""
    join: str = ""


DEFAULTS = Wanted()
"""What a caller says who says nothing of servers."""


class Gathered(NamedTuple):
    """What there is then.

    Attributes:
        beside: The server of this worker, if it has started one.
        addresses: Of all servers.
        keys: To be let in by them; None where they ask for none.
        notice: Of servers that take the place of these; None where none does.
        members: Who takes part; None where none can join.
    """

    beside: ServerBeside | None
    addresses: list[str]
    keys: Keys | None
    notice: Notice | None
    members: Members | None


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What a worker sends the others: where its server is, and why it cannot take part."""

    address: str
    problem: str


def gather(world: World, wanted: Wanted, idle_s: float = math.inf) -> Gathered:
    """Start the server of this worker, if it is to have one, and find those of all.

    Args:
        world: This worker's place.
        wanted: What there is to be.
        idle_s: See `ServerBeside`.

    Raises:
        KVStoreError: keys are missing or not to be read, an address is not reached by all, or a server does
            not start: on this worker or another, and then on all.

    Cost: Waits for all workers.
    """
    number = next(_numbers)
    topic = f"servers of store {number}"
    hosts = told_by_all(world, f"{topic}: hosts", host_identity())
    beside, keys, problem = None, None, None
    # Another one each time: the store may outlive workers that start again, with what they wrote.
    run = f"{topic}: {told_by_all(world, f'{topic}: run', secrets.token_hex(8))[0]}"
    root = root_store()
    notice = None
    if wanted.snapshots:
        shared = own_store(world, topic) if root is None else dist.PrefixStore(run, root)
        notice = Notice(shared)
    try:
        is_several = len({*hosts}) > 1
        keys = _keys(wanted.keys, is_several=is_several)
        if world.rank < wanted.num_servers:
            address = _address(wanted.address, has_keys=keys is not None, is_several=is_several)
            directory = "" if keys is None else keys.directory
            if directory:
                read_keys(directory, "server")  # that they are there
            beside = ServerBeside(
                world.size,
                wanted.staleness,
                wanted.module,
                address,
                directory,
                _folder(wanted, world.rank),
                None if notice is None else partial(notice.publish, world.rank),
                idle_s,
            )
    except KVStoreError as error:
        problem = error
    # Said also where something failed: the others wait for a word of each.
    mine = _Told("" if beside is None else beside.address, str(problem or ""))
    words = told_by_all(world, f"{topic}: addresses", msgspec.json.encode(mine).decode())
    told = [msgspec.json.decode(one, type=_Told) for one in words]
    failed = [rank for rank, one in enumerate(told) if one.problem]
    # Servers wait for all workers to leave, which will not happen now.
    if failed and beside is not None:
        beside.close()
    if problem is not None:
        raise problem
    if failed:
        raise KVStoreError(
            f"wanted servers that all workers can use, got none from worker {failed[0]}: "
            f"{told[failed[0]].problem}"
        )
    addresses = [one.address for one in told[: wanted.num_servers]]
    hosts = hosts[: wanted.num_servers]
    facts = addresses, hosts, keys is not None, notice is not None
    record = StoreRecord(run, world.size, wanted.staleness, *facts)
    members = None if root is None else founded(root, number, record, is_first=not world.rank)
    return Gathered(beside, addresses, keys, notice, members)


def gather_later(wanted: Wanted) -> Gathered:
    """Find the servers of a store that runs.

    Raises:
        KVStoreError: there is none, it is out of reach, it wants keys, or more is said than where it is.
    """
    if wanted != Wanted(keys=wanted.keys, join=wanted.join):
        raise KVStoreError(
            "wanted staleness, servers, server_module, address and snapshots where a store begins, got one "
            f"for a store to join, {wanted.join!r}, which has its own"
        )
    members = found(wanted.join)
    record, keys = members.record, None
    if record.has_keys:
        directory = named_directory(wanted.keys)
        if not directory:
            raise KVStoreError(
                f"wanted keys to join the store at {wanted.join}, got none; name the directory that its "
                "workers have: keys=DIR or RIDGELINE_KVSTORE_KEYS=DIR"
            )
        keys = read_keys(directory, "worker")
    notice = members.notice()
    # What was recorded at the beginning may have been replaced since.
    newest = [None if notice is None else notice.newest(n) for n in range(len(record.addresses))]
    addresses = [
        first if there is None else there.address
        for there, first in zip(newest, record.addresses, strict=True)
    ]
    return Gathered(None, addresses, keys, notice, members)


def _folder(wanted: Wanted, rank: int) -> Path | None:
    """Where the server of this worker writes down what it holds."""
    if not wanted.snapshots:
        return None
    folder = Path(wanted.snapshots)
    mine = f"of-{wanted.num_servers}"
    other = next((one for one in folder.glob("server-*-of-*") if not one.name.endswith(mine)), None)
    if other is not None:
        raise KVStoreError(
            f"wanted snapshots of {wanted.num_servers} servers in {folder}, got {other.name}; have as many "
            "servers as before, or name another folder"
        )
    return folder / f"server-{rank}-{mine}"


def _keys(given: str, *, is_several: bool) -> Keys | None:
    directory = named_directory(given)
    if not directory:
        if is_several:
            raise KVStoreError(
                "wanted keys for workers on several hosts, got none; make some with `ridgeline kvserver "
                "--new-keys DIR`, copy DIR to all hosts, and name it on each: keys=DIR or "
                "RIDGELINE_KVSTORE_KEYS=DIR"
            )
        return None
    return read_keys(directory, "worker")


def _address(given: str, *, has_keys: bool, is_several: bool) -> str:
    """Where the server of this worker is to listen."""
    address = given or (reached_by_all() if is_several else LOOPBACK)
    check_listening(address, has_keys=has_keys)
    check_published(address)
    if is_several and is_loopback(address):
        raise KVStoreError(
            f"wanted an address that the workers on other hosts reach, got {address!r}; name another, or none"
        )
    return address
