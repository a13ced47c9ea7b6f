"""How the experiment is usually run, and where: places for networks that run side by side."""

import os
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from ridgeline.errors import TaskError
from ridgeline.experiments.networks.request import NetworkRequest, NetworkSettings

TURNS = {"cpu": 5, "cuda": 9}
STEPS = {"cpu": 0, "cuda": 20}
"""Turns, and steps in each, by device; 0: as many as fill a turn."""


class NetworkSlot(NamedTuple):
    """Where one network runs: its GPU's number in the environment, and its cores; empty: all of them."""

    gpu: str = ""
    cores: frozenset[int] = frozenset()


def settings_for(device: str | None = None, **changes: object) -> NetworkSettings:
    """The usual settings on a device, with changes; those that are None change nothing.

    Args:
        device: `cpu` or `cuda`; None takes the GPU where there is one.
        **changes: Fields of `NetworkSettings`.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    if device in ("cpu", "cuda"):
        kind = "cpu" if device == "cpu" else "cuda"
    usual = NetworkSettings(
        device=kind,
        scale="gpu" if kind == "cuda" else "cpu",
        allow=("bf16", "random") if kind == "cuda" else (),
        turns=TURNS[kind],
        steps=STEPS[kind],
    )
    given = {name: value for name, value in changes.items() if value is not None}
    return msgspec.structs.replace(usual, **given)


def environment_of(request: NetworkRequest, slot: NetworkSlot, folder: Path) -> dict[str, str]:
    """Caches of its own for a child, its GPU, and its share of the cores."""
    found: dict[str, str] = {}
    how = request.how
    if not how.is_warm:
        # Apart, or `auto` would find compiled what the forms beside it have compiled.
        cache = request.peer_cache if request.task.startswith("compile") else request.plan_cache
        found |= {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
    if slot.gpu:
        found["CUDA_VISIBLE_DEVICES"] = slot.gpu
    # Torchrun would give each worker a single thread.
    if how.workers > 1:
        cores = len(slot.cores) or len(os.sched_getaffinity(0))
        found["OMP_NUM_THREADS"] = str(max(1, cores // how.workers))
    return found


def slots_of(how: NetworkSettings) -> list[NetworkSlot]:
    """As many places as networks run at a time.

    Raises:
        TaskError: there are fewer GPUs.
    """
    if how.parallel == 1:
        return [NetworkSlot()]
    # Where a variable hides some GPUs, children name them as that does.
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]
    if how.device != "cuda" or how.workers > 1 or how.parallel > len(gpus):
        raise TaskError(
            f"wanted a GPU for each of {how.parallel} networks at a time, got {len(gpus)} GPUs, device "
            f"{how.device} and {how.workers} workers for each; run fewer at a time"
        )
    # Those that this process may use, of which a container may leave some.
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // how.parallel)
    return [
        NetworkSlot(gpus[index], frozenset(cores[index * share : (index + 1) * share]))
        for index in range(how.parallel)
    ]
