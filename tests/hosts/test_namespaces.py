"""Hosts on one machine: they reach each other, and nothing of them is left, however their maker ended."""

import os
import shutil
import signal
import subprocess
import sys

import namespaces as helpers
import psutil
import pytest

from ridgeline.errors import LaunchError
from ridgeline.experiments import namespaces
from ridgeline.experiments.namespaces import PREFIX, bytes_per_s, hosts, lacking

MAKER = """
import subprocess, sys
from ridgeline.experiments import namespaces
namespaces.PREFIX = sys.argv[1]
with namespaces.hosts(2) as network:
    sleeper = network.start(0, ["sh", "-c", "echo there; exec sleep 600"], stdout=subprocess.PIPE)
    sleeper.stdout.readline()  # which is on its host by then
    print(sleeper.pid, *(host.namespace for host in network.hosts), flush=True)
    sys.stdin.readline()
"""
SERVER = "import socket; s = socket.create_server(('', 7000)); print('up', flush=True); c = s.accept()[0]; print(c.recv(9).decode())"
CLIENT = "import socket, sys; socket.create_connection((sys.argv[1], 7000)).sendall(b'hello')"


def own() -> list[str]:
    """Namespaces of this process."""
    return [name for name in namespaces.namespaces() if name.startswith(f"{PREFIX}-{os.getpid()}-")]


def runs(pid: int) -> bool:
    """Whether a process has not ended, collected or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("able")
def test_hosts_reach_each_other() -> None:
    """Three of them, and two networks at once have the same addresses."""
    before = own()
    with hosts(3) as network, hosts(2) as other:
        assert [host.address for host in network.hosts][:2] == [h.address for h in other.hosts]
        server = network.start(2, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        client = network.start(0, [sys.executable, "-c", CLIENT, network.hosts[2].address])
        assert server.communicate()[0] == "hello\n"
        assert client.wait() == 0
        assert len(own()) == len(before) + 3 + 1 + 2 + 1
    assert own() == before


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_left_after_an_error(monkeypatch: pytest.MonkeyPatch, *, is_there: bool) -> None:
    """What still runs on a host ends with it, also what has just been started and is not there yet."""
    if not is_there:
        monkeypatch.setattr(namespaces, "_pids", lambda namespace: [])
    before = own()
    left = []

    def fail() -> None:
        with hosts(2, "10mbit") as network:
            left.append(network.start(1, ["sleep", "600"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [process.wait() for process in left] == [-signal.SIGTERM]
    assert own() == before


@pytest.mark.usefixtures("able")
def test_what_a_killed_process_left_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces, and processes in them; those of a process that lives stay.

    They have names of their own: tests beside this one remove what killed processes left, too.
    """
    prefix = f"ridgeline-killed-{os.getpid()}"
    monkeypatch.setattr(namespaces, "PREFIX", prefix)
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKER, prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(2)
    ]
    told = [maker.stdout.readline().split() for maker in makers if maker.stdout is not None]
    makers[0].kill()
    makers[0].communicate()
    assert runs(int(told[0][0]))
    assert set(told[0][1:]) <= set(namespaces.namespaces())
    with hosts(2):
        there = set(namespaces.namespaces())
    assert not there & set(told[0][1:])
    assert set(told[1][1:]) <= there
    assert not runs(int(told[0][0]))
    assert runs(int(told[1][0]))
    makers[1].communicate("end\n")
    assert not set(told[1][1:]) & set(namespaces.namespaces())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Privileges first, then the programs, then what the kernel refuses."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lacking() == "privileges: network namespaces take root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert lacking() == "the program ip and tc (package iproute2)"
    assert lacking(is_shaped=False) == "the program ip (package iproute2)"
    with pytest.raises(LaunchError) as refused, hosts(2):
        pass
    assert str(refused.value) == (
        "wanted 2 hosts as network namespaces, got a machine that lacks the program ip (package iproute2); "
        "run as root with iproute2 installed"
    )


@pytest.mark.usefixtures("able")
def test_what_the_kernel_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that failed."""
    before = own()
    monkeypatch.setattr(
        namespaces, "_token_bucket", lambda name, rate: ("tc", "-n", name, "nothing")
    )
    assert lacking(is_shaped=False) == ""
    assert lacking().startswith("token buckets (`tc -n ridgeline-net-")
    assert own() == before


@pytest.mark.parametrize("is_required", [False, True])
def test_a_skip_is_a_failure_where_hosts_are_required(
    monkeypatch: pytest.MonkeyPatch, is_required: bool
) -> None:
    """As in `.ci/run`; both say what is missing."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv(helpers.REQUIRED, "1" if is_required else "")
    kind = pytest.fail.Exception if is_required else pytest.skip.Exception
    with pytest.raises(kind) as ended:
        helpers.need_hosts()
    got = (
        "wanted hosts as network namespaces with shaped links, got a machine that lacks privileges: network "
        "namespaces take root; "
    )
    rest = (
        "RIDGELINE_REQUIRE_HOSTS is set, so this is no reason to skip"
        if is_required
        else "run as root with iproute2 installed"
    )
    assert str(ended.value) == got + rest


def test_rates() -> None:
    assert [bytes_per_s(rate) for rate in ("8kbit", "100mbit", "2.5gbit")] == [1e3, 12.5e6, 312.5e6]
    for wrong in ("fast", "100", "0mbit", "-1mbit", "100MB"):
        with pytest.raises(
            LaunchError, match=f"wanted a rate such as 100mbit or 1gbit, got '{wrong}'"
        ):
            bytes_per_s(wrong)
