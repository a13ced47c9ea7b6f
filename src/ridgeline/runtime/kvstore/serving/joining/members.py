"""Who takes part in a store with servers: what a process that comes later reads, and the number that it gets.

All of that is in torch's store of the job, below what `create` was called there: where the servers are, who
is counted how far, and by worker 0 which server holds what of each key. Numbers are given by an atomic count,
so that each is given once; one of a worker that is gone is not given again, for its pushes are in the values.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch.distributed as dist

from ridgeline.errors import KVStoreError, first_line
from ridgeline.runtime.kvstore.arguments import Held, Key
from ridgeline.runtime.kvstore.serving.addressing.addresses import (
    host_identity,
    is_loopback,
)
from ridgeline.runtime.kvstore.serving.addressing.epochs import Notice
from ridgeline.runtime.kvstore.serving.server.shard import FIRST
from ridgeline.runtime.kvstore.values.placement import ValuePart
from ridgeline.workers.leaving import job_store

FIND_S = 30.0
"""How long a job, and a store in it, is looked for."""
BEGIN_S = 300.0
"""How long the first step of a training is waited for: its workers may have started at the same time."""
_LOOK_S = 0.05
_TRAINS = "it trains"
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\[\]:/]+):(\d{1,5})(?:/(\d{1,9}))?")


class StoreRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is recorded of a store.

    Attributes:
        run: Another one each time that the job begins again.
        num_workers: Who began it.
        staleness: See `Slots`.
        addresses: Of the servers.
        hosts: On which these are.
        has_keys: They ask for keys.
        writes: They write down what they hold, and are replaced.
    """

    run: str
    num_workers: int
    staleness: int | None
    addresses: list[str]
    hosts: list[str]
    has_keys: bool
    writes: bool


class _Placed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    sizes: tuple[int, ...]
    parts: tuple[ValuePart, ...]


class Members:
    """A store of a job, to those who take part.

    Args:
        root: The store of torch that the job has, used by nothing else in this process.
        address: Where others join.
        record: What is recorded of it.
        is_later: This worker was not there when it began.

    Attributes:
        address, record, is_later: As above.
    """

    def __init__(
        self, root: dist.Store, address: str, record: StoreRecord, *, is_later: bool = False
    ) -> None:
        self.address = address
        self.record = record
        self.is_later = is_later
        self._store = dist.PrefixStore(record.run, root)

    def notice(self) -> Notice | None:
        """Of servers that take the place of others; None where none does."""
        return Notice(self._store) if self.record.writes else None

    def next_rank(self) -> int:
        """A number that was not used before."""
        # `add` gives the sum: the first who joins gets 1, and the number behind those who began.
        return self.record.num_workers - 1 + self._store.add("joined", 1)

    def say_it_trains(self) -> None:
        """Say that a training by a plan has made its first step, for others to join it."""
        self._store.set(_TRAINS, "")

    def await_training(self) -> None:
        """Return once a training by a plan has made its first step.

        Raises:
            KVStoreError: it has not, for long.
        """
        try:
            self._store.wait([_TRAINS], timedelta(seconds=BEGIN_S))
        except RuntimeError as error:
            raise KVStoreError(
                f"wanted a training by a plan at {self.address} that has made its first step within "
                f"{BEGIN_S:.0f} s, got {first_line(error)}; make sure that its workers train by rl.TrainStep"
            ) from error

    def tell(self, held: Mapping[Key, Held], parts: Mapping[Key, Sequence[ValuePart]]) -> None:
        """Say which server holds what of keys."""
        told = {
            _name(key): msgspec.json.encode(
                _Placed(str(one.dtype), tuple(one.shape), tuple(parts[key]))
            ).decode()
            for key, one in held.items()
        }
        # In one message, as a model has thousands of keys.
        store: Any = self._store  # stubs do not know this of it
        store.multi_set([*told], [*told.values()])

    def parts_of(
        self, held: Mapping[Key, Held], is_first_there: Callable[[], bool]
    ) -> dict[Key, tuple[ValuePart, ...]]:
        """Which server holds what of keys, once worker 0 has said so.

        Raises:
            KVStoreError: they are of another shape or type there, worker 0 is gone and has not said so, or
                the store of the job is.
        """
        names = [*map(_name, held)]
        try:
            while not self._store.check(names):
                if not is_first_there():
                    raise KVStoreError(
                        f"wanted first values of keys {[*held][:8]} from worker {FIRST}, got none of some of "
                        "them, and that worker is gone; restart with all workers"
                    )
                time.sleep(_LOOK_S)
            told = [msgspec.json.decode(one, type=_Placed) for one in self._store.multi_get(names)]
        except RuntimeError as error:  # KVStoreError is none
            raise KVStoreError(
                f"wanted the store of the job at {self.address}, to read where keys are, got "
                f"{first_line(error)}; a process joins while the job runs"
            ) from error
        for (key, mine), its in zip(held.items(), told, strict=True):
            if (str(mine.dtype), tuple(mine.shape)) != (its.dtype, its.sizes):
                raise KVStoreError(
                    f"wanted {its.dtype.removeprefix('torch.')} {[*its.sizes]} for key {key!r}, as it was "
                    f"initialised, got {mine}"
                )
        return {key: one.parts for key, one in zip(held, told, strict=True)}


def root_store() -> dist.TCPStore | None:
    """The store of the job, as other processes reach it; None where there is none that they could.

    A process that comes later knows none of the prefixes that torch puts before names.
    """
    if not dist.is_initialized():
        return None
    root: Any = cast(Any, job_store()).clone()  # stubs do not know it
    # Prefixes may be nested: elastic agents put one of their own around that of the group.
    while isinstance(root, dist.PrefixStore):
        root = root.underlying_store
    return root if isinstance(root, dist.TCPStore) else None


def founded(root: dist.TCPStore, number: int, record: StoreRecord, *, is_first: bool) -> Members:
    """A store that this worker has begun with others; the first of them reports it.

    Args:
        root: See `root_store`.
        number: Of the store in the job.
        record: What is recorded.
        is_first: This is worker 0.
    """
    if is_first:
        root.set(_topic(number), msgspec.json.encode(record).decode())
    host = f"[{root.host}]" if ":" in root.host else root.host
    return Members(root, f"tcp://{host}:{root.port}/{number}", record)


def found(address: str) -> Members:
    """A store that runs, to a process that joins.

    Raises:
        KVStoreError: the address is none, no store is there, or its servers are out of reach.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise KVStoreError(
            f"wanted the address of a running store, such as 'tcp://10.0.0.3:29500/0', got {address!r}; it "
            "is `store.address` of its workers, or tcp://MASTER_ADDR:MASTER_PORT of their job"
        )
    host, port, number = match[1].strip("[]"), int(match[2]), int(match[3] or 0)
    try:
        root = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=FIND_S))
        told = root.get(_topic(number))
        record = msgspec.json.decode(told, type=StoreRecord)
    except (RuntimeError, ValueError) as error:  # of torch; of msgspec
        raise KVStoreError(
            f"wanted store {number} of a job that runs at {address!r}, got {first_line(error)}; make sure "
            "that its workers have created it, of kind 'dist_async'"
        ) from error
    for server, place in zip(record.addresses, record.hosts, strict=True):
        # The same loopback address is another server on another host, or none.
        if is_loopback(server) and place != host_identity():
            raise KVStoreError(
                f"wanted servers that this host reaches, got one at {server} of another host; have the "
                "workers of that job create the store with address='tcp://HOST:*' and keys"
            )
    return Members(root, address, record, is_later=True)


def _topic(number: int) -> str:
    return f"ridgeline kvstore {number}"


def _name(key: Key) -> str:
    return f"key {msgspec.json.encode(key).decode()}"
