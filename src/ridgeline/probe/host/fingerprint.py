"""What this host is: processor, cores, caches, devices, versions; and where its profile is kept."""

import hashlib
import os
import platform
import sys
from pathlib import Path

import msgspec
import psutil
import torch

from ridgeline.codec import cache_directory
from ridgeline.machine import Device, Host, Machine
from ridgeline.probe.host.caches import caches
from ridgeline.probe.host.control_groups import cpu_quota, memory_limit
from ridgeline.probe.host.processors import allowed, line_of

SCHEMA = 1
"""Raised when profiles of older releases must not be used any more."""


def host() -> Host:
    """The computer around the devices, as this process may use it."""
    return Host(
        name=platform.node(),
        processor=_processor(),
        cores=num_cores(),
        memory_bytes=memory_bytes(),
        cache_bytes=max((cache.num_bytes for cache in caches()), default=0),
        system=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def devices() -> tuple[Device, ...]:
    """The CPU, and every GPU that torch can use."""
    found = [Device(kind="cpu", index=0, name=_processor(), memory_bytes=memory_bytes())]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Device(
                kind="cuda",
                index=index,
                name=properties.name,
                memory_bytes=properties.total_memory,
                capability=f"{properties.major}.{properties.minor}",
            )
        )
    return tuple(found)


def fingerprint(host: Host, devices: tuple[Device, ...]) -> str:
    """Sixteen hexadecimal digits that change with whatever changes the numbers.

    That is: processor, cores, memory, GPUs, driver, versions of torch and CUDA, minor version of Python.
    """
    identity = (
        SCHEMA,
        Machine.version,
        host.name,
        host.processor,
        host.cores,
        host.memory_bytes >> 30,  # kernels report a few pages more or less after an update
        [(device.kind, device.index, device.name, device.memory_bytes >> 30) for device in devices],
        driver(),
        str(torch.__version__),
        torch.version.cuda,
        sys.version_info[:2],
    )
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]


def cache_path(fingerprint: str, hosts: int = 1) -> Path:
    """Where the profile of this host, or of several like it, is kept."""
    several = f"-{hosts}-hosts" if hosts > 1 else ""
    return cache_directory() / f"machine-{fingerprint}{several}.json"


def num_hosts() -> int:
    """Hosts that the processes of this group run on, according to torchrun; without it 1."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def num_cores() -> int:
    """Cores that this process may use: its affinity, further limited by a control group's quota."""
    # Not the host's: taskset and containers leave a process fewer.
    cores, grant = len(allowed()) or os.cpu_count() or 1, cpu_quota()
    return max(1, cores if grant is None else min(cores, int(grant.amount)))


def driver() -> str:
    """Version of the NVIDIA driver; empty without GPUs."""
    if not torch.cuda.is_available():
        return ""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "unknown"  # a GPU without NVML (some virtual machines) is still a GPU
    return version.decode() if isinstance(version, bytes) else str(version)


def memory_bytes() -> int:
    """Memory of the host, or what the control groups grant of it."""
    # Control groups of version 1 have a huge limit where there is none.
    total, grant = psutil.virtual_memory().total, memory_limit()
    return total if grant is None else min(total, int(grant.amount))


def _processor() -> str:
    told = line_of(Path("/proc/cpuinfo"), "model name").removeprefix(":").strip()
    return told or platform.processor() or platform.machine()
