"""Where servers listen: on the loopback, or where other hosts reach them, which takes keys."""

import ipaddress
import os
import re
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.segment import SHARED_FILES
from ridgeline.workers import attendance
from ridgeline.workers.leaving import job_store
from ridgeline.workers.world import World

LOOPBACK = "tcp://127.0.0.1:*"
"""A free port that this host alone reaches."""
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\[\]:]+):(\d{1,5}|\*)")
_MOST_PORT = 65535
_ANY_PORT = 9
"""No message goes there: a route is asked for."""


def host_identity() -> str:
    """Equal in two processes where both reach the same loopback and the same files in memory.

    A machine has several of them where containers or network namespaces part it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
        memory = SHARED_FILES.stat().st_dev
    except OSError:  # no Linux, where none of these part a machine
        return socket.gethostname()
    return f"{boot}/{network}/{memory}"


def check_listening(address: str, *, has_keys: bool) -> None:
    """Refuse an address that is none, or that other hosts reach where no keys are required.

    Raises:
        KVStoreError: says what to do.
    """
    # In this order: with keys, too, what is no address is refused.
    if is_loopback(address) or has_keys:
        return
    raise KVStoreError(
        f"wanted keys to listen at {address!r}, which other hosts reach, got none; make some with `ridgeline "
        "kvserver --new-keys DIR`, copy DIR to all hosts, and name it on each: keys=DIR, --keys DIR or "
        "RIDGELINE_KVSTORE_KEYS=DIR"
    )


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address. A name is taken for one that others reach.

    Raises:
        KVStoreError: it is none.
    """
    host = _host(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_ipv6(address: str) -> bool:
    """Whether sockets have to be configured for it.

    Raises:
        KVStoreError: it is none.
    """
    return ":" in _host(address)


def check_published(address: str) -> None:
    """Refuse to give other workers an address that says nothing about where it is.

    Raises:
        KVStoreError: it stands for all interfaces.
    """
    host = _host(address)
    if host in ("*", "0.0.0.0", "::"):
        raise KVStoreError(
            f"wanted the address of one interface, as other workers connect to it, got {address!r}; name "
            "that which they reach, such as 'tcp://10.0.0.3:*'"
        )


def reached_by_all() -> str:
    """An address of this host that the others of the job reach: that from which it reaches MASTER_ADDR.

    Raises:
        KVStoreError: there is no MASTER_ADDR, no route to it, or it is a loopback.
    """
    master = os.environ.get("MASTER_ADDR", "")
    advice = "give address='tcp://HOST:*' with an address of this host that the others reach"
    if not master:
        raise KVStoreError(f"wanted MASTER_ADDR to find out where others are, got none; {advice}")
    try:
        # Of UDP, where connecting sends nothing: the system only chooses the interface.
        family, kind, _, _, target = socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            host = str(probe.getsockname()[0])
    except OSError as error:
        raise KVStoreError(
            f"wanted a route to MASTER_ADDR={master}, got {error.strerror}; {advice}"
        ) from error
    # On the first host MASTER_ADDR is often itself, or its name is one of the loopback.
    if ipaddress.ip_address(host).is_loopback:
        raise KVStoreError(
            f"wanted an address that other hosts reach, got {host}, which MASTER_ADDR={master} is here; "
            f"{advice}"
        )
    return f"tcp://[{host}]:*" if family == socket.AF_INET6 else f"tcp://{host}:*"


def told_by_all(world: World, topic: str, mine: str) -> list[str]:
    """What each worker says, by rank; through the store of the job.

    Args:
        world: This worker's place.
        topic: Another one each time.
        mine: What this one says.

    Raises:
        AbsentWorkerError: another worker says nothing within the time-out of the job; names it.

    Cost: Waits for all.
    """
    if world.size == 1:
        return [mine]
    store = dist.PrefixStore(topic, job_store())
    with attendance.meeting("an exchange through the store of the job", world):
        store.set(str(world.rank), mine)
        names = [str(rank) for rank in range(world.size)]
        # As long as a collective, whatever time-out the store itself was made with.
        store.wait(names, timedelta(seconds=world.timeout_s))
        told = store.multi_get(names)
    return [one.decode() for one in told]


def _host(address: str) -> str:
    found = _ADDRESS.fullmatch(address)
    # ZeroMQ takes the lower 16 bits of a larger port.
    if found is None or (found[2] != "*" and int(found[2]) > _MOST_PORT):
        raise KVStoreError(
            f"wanted an address such as 'tcp://10.0.0.3:*' or {LOOPBACK!r}, got {address!r}; correct it "
            f"(ports end at {_MOST_PORT})"
        )
    return found[1].strip("[]")
