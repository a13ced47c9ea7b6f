"""What programs that keep results share: names that say what, on which hardware and when; progress."""

import argparse
import datetime
import os
import re
import sys
from collections.abc import Sequence

import torch

from ridgeline.machine import Device, Host, Quantity


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a program's docstring as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )


def say(line: str) -> None:
    """A line of progress, on stderr at once."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - for programs


def now() -> str:
    """The moment in UTC, as ISO 8601 has it, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def quartiles(figures: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of figures, of which there is at least one, and how many they are, for JSON."""
    found = Quantity.measured(figures, "s")
    return {"median": found.value, "low": found.low, "high": found.high, "n": found.n}


def file_name(what: str, hardware: str) -> str:
    """`<what>_<hardware>_<date>.json`, of today."""
    words = "_".join(hardware.split())
    return f"{what}_{words}_{datetime.datetime.now(datetime.UTC):%Y%m%d}.json"


def model_of(name: str) -> str:
    """The model in a device's name: `H100` of "NVIDIA H100 80GB HBM3"; else its last word."""
    words = name.split()
    models = [word for word in words if re.fullmatch(r"[A-Z]{1,2}\d{2,3}[\w-]*", word)]
    return models[0] if models else words[-1]


def hardware_of(devices: Sequence[Device], host: Host, *, is_joint: bool = False) -> str:
    """`1xH200`, or `2-core-CPU` without a GPU.

    Args:
        devices: Of the machine.
        host: Its processors.
        is_joint: All GPUs took part together; a single one has nobody to exchange with and took none.
    """
    names = [device.name for device in devices if device.kind == "cuda"]
    count = len(names) if is_joint else min(1, len(names))
    if count > is_joint:
        return f"{count}x{model_of(names[0])}"
    return f"{host.cores}-core-CPU"


def this_hardware(device: str) -> str:
    """The name of the GPU in use, or `2-core-CPU` by the cores that this process may use."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{len(os.sched_getaffinity(0))}-core-CPU"
