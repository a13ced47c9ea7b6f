"""Several hosts on one machine: network namespaces with a switch between them, and links of a wanted rate.

Each host is a network namespace with a loopback and one interface, `eth0`. The other ends of the interfaces
are joined by a bridge in a namespace of its own, so that nothing is added to this machine's own network, and
addresses of two networks never meet. A rate is a token bucket on what each host sends.

Names begin with the process that made them: what a killed process left is removed by the next.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline import units
from ridgeline.errors import LaunchError

PREFIX = "ridgeline-net"
INTERFACE = "eth0"
SUBNET = "10.77.0"
LEAST_BURST_BYTES = 16_000
"""Ten frames; a bucket smaller than a frame lets nothing through."""
BURST_S = 0.002
"""How long a link may run faster than its rate after it was idle."""
QUEUE = "100ms"
"""Waiting longer than this, frames are dropped; TCP keeps fewer in the queue of its own host."""
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL for processes left in a namespace."""

_serial = itertools.count()


class NamespaceHost(NamedTuple):
    """One of the hosts: its network namespace and its address on the common link."""

    namespace: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What precedes a command that runs on this host; the process is that of the command itself."""
        return ("ip", "netns", "exec", self.namespace)


class NamespaceNetwork:
    """Hosts that reach each other; made and removed by `hosts`.

    Attributes:
        hosts: In order of their addresses.
        rate: Of every link, as `tc` writes it; None for unshaped ones.
    """

    def __init__(self, hosts: Sequence[NamespaceHost], rate: str | None) -> None:
        self.hosts = tuple(hosts)
        self.rate = rate
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> "subprocess.Popen[str]":
        """A process on a host.

        Args:
            host: Its index.
            command: Program and arguments.
            environment: Added to that of this process; gloo is notified of the link anyway.
            settings: Of `subprocess.Popen`.
        """
        process = subprocess.Popen(
            [*self.hosts[host].prefix, *command],
            # What the caller gives comes last, and wins.
            env={**os.environ, **gloo_environment(), **(environment or {})},
            text=True,
            **settings,
        )
        self._started.append(process)
        return process

    def terminate(self) -> None:
        """Send SIGTERM to all that was started and still runs, wherever it is by now."""
        for process in self._started:
            process.terminate()

    def cut(self, host: int) -> None:
        """Take a host's link down: nothing reaches it, and it reaches nothing; its processes run on."""
        _ip("-n", self.hosts[host].namespace, "link", "set", INTERFACE, "down")

    def restore(self, host: int) -> None:
        """Bring up a link that was cut."""
        _ip("-n", self.hosts[host].namespace, "link", "set", INTERFACE, "up")


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[NamespaceNetwork]:
    """So many hosts on one link; afterwards they and all processes on them are gone.

    Args:
        count: 2 to 200.
        rate: Of each link, both ways, e.g. `100mbit`; None leaves it as fast as the machine.

    Raises:
        LaunchError: this machine lacks what it takes, or a command failed; see `lacking`.

    Cost: Some ten short commands a host.
    """
    missing = lacking(is_shaped=rate is not None)
    if missing:
        raise LaunchError(
            f"wanted {count} hosts as network namespaces, got a machine that lacks {missing}; run as root "
            "with iproute2 installed"
        )
    # Interfaces of killed processes stay until the machine restarts, and would add up.
    remove_stale()
    owner = _owner()
    switch = f"{owner}-switch"
    made = [NamespaceHost(f"{owner}-{index}", f"{SUBNET}.{index + 1}") for index in range(count)]
    network = NamespaceNetwork(made, rate)
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for index, host in enumerate(made):
            _join(host, switch, f"port{index}")
            if rate is not None:
                _run(_token_bucket(host.namespace, rate), f"a link of {rate}")
        yield network
    finally:
        # Those that have just been started may not have come to their host, where others are looked for.
        network.terminate()
        _remove([*(host.namespace for host in made), switch])


def lacking(*, is_shaped: bool = True) -> str:
    """What this machine lacks to make hosts, in words; empty where it lacks nothing.

    Args:
        is_shaped: Whether links are to have a rate.

    Cost: Makes a namespace with an interface, and removes it.
    """
    if os.geteuid() != 0:
        return "privileges: network namespaces take root"
    tools = ("ip", "tc") if is_shaped else ("ip",)
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if absent:
        return f"the program {' and '.join(absent)} (package iproute2)"
    probe = f"{_owner()}-probe"
    # Tried, since users, containers and kernels can refuse each of these.
    tried: dict[str, Sequence[str]] = {
        "privileges to add a network namespace": ("ip", "netns", "add", probe),
        "veth interfaces": ("ip", "-n", probe, *_veth("port", probe)),
        "bridges": ("ip", "-n", probe, "link", "add", "br0", "type", "bridge"),
    }
    if is_shaped:
        tried["token buckets"] = _token_bucket(probe, "100mbit")
    for what, command in tried.items():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            _remove([probe])
            return f"{what} (`{' '.join(command)}`: {' '.join(done.stderr.split())})"
    _remove([probe])
    return ""


def bytes_per_s(rate: str) -> float:
    """The bytes per second of a rate such as `100mbit` or `1gbit`, headers included.

    Raises:
        LaunchError: it is not written so.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or not float(found[1]):
        raise LaunchError(
            f"wanted a rate such as 100mbit or 1gbit, got {rate!r}; write a number above 0 and kbit, mbit or "
            "gbit"
        )
    return float(found[1]) * units.BITS_PER_S[found[2]] / 8


def gloo_environment() -> dict[str, str]:
    """What makes gloo use the link, for processes on a host."""
    return {"GLOO_SOCKET_IFNAME": INTERFACE}


def remove_stale() -> None:
    """Remove the namespaces of processes that are gone, and what still runs in those."""
    owner = rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+"
    owned = [found for name in namespaces() if (found := re.fullmatch(owner, name))]
    _remove([found[0] for found in owned if _born(int(found[1])) != int(found[2])])


def namespaces() -> list[str]:
    """Names of the network namespaces that Ridgeline has made on this machine, of all its processes."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line]
    return [name for name in names if name.startswith(PREFIX)]


def _join(host: NamespaceHost, switch: str, port: str) -> None:
    """Make a host and plug it into the switch."""
    _ip("netns", "add", host.namespace)
    _ip("-n", switch, *_veth(port, host.namespace))
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    # A new namespace has its loopback down.
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip("-n", host.namespace, "link", "set", INTERFACE, "up")


def _veth(port: str, namespace: str) -> tuple[str, ...]:
    """Arguments of `ip` for a pair of interfaces: `port` here, the other in a host."""
    peer = ("peer", "name", INTERFACE, "netns", namespace)
    return ("link", "add", "name", port, "type", "veth", *peer)


def _token_bucket(namespace: str, rate: str) -> tuple[str, ...]:
    # What the link carries between two ticks of the kernel must fit, or it never reaches its rate.
    burst = max(LEAST_BURST_BYTES, round(BURST_S * bytes_per_s(rate)))
    bucket = ("tbf", "rate", rate, "burst", str(burst), "latency", QUEUE)
    return ("tc", "-n", namespace, "qdisc", "replace", "dev", INTERFACE, "root", *bucket)


def _remove(names: Sequence[str]) -> None:
    """End what runs in namespaces, then remove them; some may not be there."""
    there = set(namespaces())
    for name in names:
        if name in there:
            _end_processes(name)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _end_processes(namespace: str) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        limit = time.monotonic() + GRACE_S
        for pid in _pids(namespace):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        # A namespace with processes outlives the removal of its name.
        while _pids(namespace) and time.monotonic() < limit:
            time.sleep(0.02)


def _pids(namespace: str) -> list[int]:
    """Processes in a namespace that still run; one that only waits to be collected has left it."""
    command = ["ip", "netns", "pids", namespace]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def _owner() -> str:
    """How names of this process begin, another each time."""
    return f"{PREFIX}-{os.getpid()}-{_born(os.getpid())}-{next(_serial)}"


def _born(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 where it is gone. Pids alone come again."""
    try:
        # Not psutil's time: that is counted from a moment that changes when the clock is set.
        told = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(told.rpartition(")")[2].split()[19])


def _ip(*arguments: str) -> None:
    _run(("ip", *arguments), "a host")


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(
            f"wanted {what} as network namespace, got `{' '.join(command)}`: "
            f"{' '.join(done.stderr.split())}; see what the kernel offers"
        )
