"""Hosts for tests: skips that say what is missing, and torchrun across the hosts."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ridgeline.experiments.namespaces import NamespaceNetwork, lacking

REQUIRED = "RIDGELINE_REQUIRE_HOSTS"
"""Where this variable is set, a machine that cannot make hosts fails the tests that need some."""
PORT = 29500
"""Every network has addresses of its own, so that no port can be taken."""


def need_hosts() -> None:
    """Skip where this machine cannot make hosts, or fail if it must."""
    missing = lacking()
    if not missing:
        return
    message = (
        f"wanted hosts as network namespaces with shaped links, got a machine that lacks {missing}"
    )
    if os.environ.get(REQUIRED):
        pytest.fail(f"{message}; {REQUIRED} is set, so this is no reason to skip", pytrace=False)
    pytest.skip(f"{message}; run as root with iproute2 installed")


def environment(cache: Path) -> dict[str, str]:
    """Of a worker on a host: one thread, no GPU, a cache of its own."""
    return {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(cache)}


def torchrun(network: NamespaceNetwork, script: Path, directory: Path, *arguments: str) -> None:
    """Run a script with one worker on each host, under one launcher a host; fail if one fails.

    Args:
        network: Its first host has the rendezvous.
        script: Called with `directory` and the arguments.
        directory: For what the workers write.
        *arguments: Further ones of the script.
    """
    launchers = []
    for rank in range(len(network.hosts)):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
            *("--nnodes", str(len(network.hosts)), "--node-rank", str(rank)),
            *("--master-addr", network.hosts[0].address, "--master-port", str(PORT)),
            *(str(script), str(directory), *arguments),
        ]
        launchers.append(started(network, rank, command, directory))
    wait(launchers, [0] * len(launchers))


def started(
    network: NamespaceNetwork,
    rank: int,
    command: Sequence[str],
    directory: Path,
    variables: dict[str, str] | None = None,
) -> "subprocess.Popen[str]":
    """A process on the host of that number, its errors caught."""
    return network.start(
        rank,
        command,
        environment={**environment(directory), **(variables or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait(processes: Sequence["subprocess.Popen[str]"], codes: Sequence[int]) -> None:
    """Wait for processes, and fail with their last words if they ended otherwise than by these codes."""
    errors = [process.communicate()[1] for process in processes]
    found = [process.returncode for process in processes]
    assert found == list(codes), "\n".join(error[-3000:] for error in errors)
