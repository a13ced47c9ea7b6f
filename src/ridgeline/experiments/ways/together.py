"""Cases that several worker processes hold together: asked for and answered as JSON.

A module of such cases has a function `group_cases(world, asked)`, which lists them in every worker alike.
"""

import importlib
import time
from collections.abc import Sequence

import msgspec

from ridgeline.codec import Value
from ridgeline.experiments.namespaces import NamespaceNetwork, gloo_environment
from ridgeline.experiments.ways.contest import hold
from ridgeline.experiments.ways.experiment import LEAST_S
from ridgeline.experiments.ways.result import WayCase
from ridgeline.probe.group import run_in_group
from ridgeline.probe.peers import Peers
from ridgeline.runtime.world import World

MOST_OVER = 4.0
"""A group may take so many times the wanted seconds, and `START_S`, before it is ended."""
START_S = 600.0


class Asked(Value, frozen=True, kw_only=True):
    """What a group of workers is to hold.

    Attributes:
        home: Module of the cases, with `group_cases`.
        device: `cpu` or `cuda`.
        quick: Fewer and smaller cases.
        only: Names of cases to hold; the others are left out.
        limit_s: Seconds to take, about.
        rate: Of the links between hosts, one a worker; empty for links that are not shaped.
        lacking: Why the workers are no hosts of their own; empty where they are.
    """

    home: str
    device: str
    quick: bool
    only: tuple[str, ...]
    limit_s: float
    rate: str = ""
    lacking: str = ""


def hold_together(
    asked: Asked, *, workers: int, threads: int, network: NamespaceNetwork | None = None
) -> tuple[WayCase, ...]:
    """The cases, held by so many workers on this machine.

    Args:
        asked: What they hold.
        workers: How many there are.
        threads: Of torch in each; 0 leaves them.
        network: Gives each worker a host of its own; None: they share this one.

    Raises:
        WorkerError: a worker failed otherwise than in a way, or the group took far too long.

    Cost: Starts the workers, and keeps the machine busy for about `limit_s`.
    """
    environment: dict[str, str] = {}
    prefixes: tuple[Sequence[str], ...] = ()
    if network is not None:
        # As torchrun tells its workers: what was measured of another network is then measured again.
        environment = {**gloo_environment(), "GROUP_WORLD_SIZE": str(len(network.hosts))}
        prefixes = tuple(host.prefix for host in network.hosts)
    reply = run_in_group(
        "ridgeline.experiments.ways.together:work",
        msgspec.json.encode(asked),
        workers=workers,
        threads=threads,
        device=asked.device,
        deadline_s=START_S + MOST_OVER * asked.limit_s,
        environment=environment,
        prefixes=prefixes,
    )
    return msgspec.json.decode(reply, type=tuple[WayCase, ...])


def work(request: bytes) -> bytes:
    """Target of `run_in_group`: hold the cases with the others, and reply what came of them."""
    asked = msgspec.json.decode(request, type=Asked)
    world = World.join(device=asked.device)
    peers = Peers.of(world.group())
    make_cases = importlib.import_module(asked.home).group_cases
    chosen = [case for case in make_cases(world, asked) if case.name in asked.only]
    end = time.perf_counter() + asked.limit_s
    held = []
    for index, case in enumerate(chosen):
        room_s = max(LEAST_S, (end - time.perf_counter()) / (len(chosen) - index))
        held.append(hold(case, limit_s=room_s, progress=_silent, peers=peers))
    return msgspec.json.encode(tuple(held))


def _silent(line: str) -> None:
    """Workers say nothing."""
