"""The cases: a model of `rl.tasks`, trained by several workers in every way that sends gradients."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ridgeline import units
from ridgeline.experiments.namespaces import bytes_per_s
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.experiments.sync.ours import QUICK_WANTED, WANTED, Profile, our_ways
from ridgeline.experiments.sync.peers import PEERS, QUICK_PEERS
from ridgeline.experiments.sync.training import Training, make_runner
from ridgeline.experiments.ways.case import Bound, Case, Contest, Way
from ridgeline.experiments.ways.together import GroupRequest
from ridgeline.laws.collectives import bus_bandwidth_factor
from ridgeline.workers.world import World

BATCH = {"resnet18": 64, "mlp": 128}
"""Samples a step, of all workers together: small, so that two cores take a fraction of a second."""
CASES = tuple(BATCH)
QUICK_CASES = ("resnet18",)
COMPUTE, ONE_ALL_REDUCE = "computing alone", "all gradients alone, in one all-reduce"


class ShapedLink(NamedTuple):
    """What joins the workers.

    Attributes:
        words: For headings.
        bytes_per_s: Of each worker, one way; 0 where it is not shaped.
        is_counted: Whether nothing but this experiment uses it, so that its counters say what was sent.
    """

    words: str
    bytes_per_s: float
    is_counted: bool


def group_cases(world: World, asked: GroupRequest) -> Sequence[Case]:
    """A case a model, for workers of a process group."""
    link, profile = _link(world, asked), Profile()
    return [
        Case(
            name=name,
            title=f"{BATCH[name]} samples a step over {link.words}",
            prepare=partial(_contest, world, name, link, profile, is_quick=asked.quick),
            unit="step",
        )
        for name in CASES
    ]


def _link(world: World, asked: GroupRequest) -> ShapedLink:
    if asked.lacking:
        workers = f"{world.size} local workers, not shaped ({asked.lacking})"
        return ShapedLink(workers, 0.0, is_counted=False)
    if not asked.rate:
        return ShapedLink(f"{world.size} hosts, an unshaped link", 0.0, is_counted=True)
    words = f"{world.size} hosts, a link of {asked.rate}"
    return ShapedLink(words, bytes_per_s(asked.rate), is_counted=True)


def _contest(
    world: World, name: str, link: ShapedLink, profile: Profile, *, is_quick: bool
) -> Contest:
    # As many samples altogether, however many workers share them.
    training = Training(world, name, BATCH[name] // world.size)
    counted = link.is_counted
    ways = []
    for words in QUICK_PEERS if is_quick else PEERS:
        peer, units_ = PEERS[words]
        make = partial(make_runner, training, partial(peer, training), counted, units_)
        ways.append(Way(words, "peer", make))
    names = QUICK_WANTED if is_quick else WANTED
    ways += our_ways(training, profile, names=names, is_counted=counted)
    return Contest(ways=ways, bound=_bound(training, link, is_quick=is_quick))


def _bound(training: Training, link: ShapedLink, *, is_quick: bool) -> Bound:
    """No exact step ends before it has computed, and its gradients have crossed the link.

    One all-reduce is a part of it where the link's rate is unknown; else it is shown separately, unless
    quick.
    """
    world = training.world
    model = training.made()
    alone = PlainStep(model, model, training.loss_fn, training.optimizer(model))
    batch = training.batches[0]
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # Bytes are what counts, so that dtypes of parameters play no part.
    flat = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device).view(torch.float32)
    parts = {
        COMPUTE: lambda: alone(batch),
        ONE_ALL_REDUCE: lambda: dist.all_reduce(flat, group=world.group()),
    }
    # What each worker must send of all gradients, whatever the algorithm.
    sent = num_bytes * bus_bandwidth_factor("all_reduce", world.size)
    if not link.bytes_per_s:
        return Bound(
            parts=parts,
            seconds=lambda taken: max(taken[COMPUTE], taken[ONE_ALL_REDUCE]),
            reason="the longer of computing and one all-reduce, where all gradients are sent",
        )
    if is_quick:
        # It is no part of this bound, and takes about as long as a step.
        del parts[ONE_ALL_REDUCE]
    link_s = sent / link.bytes_per_s
    return Bound(
        parts=parts,
        seconds=lambda taken: max(taken[COMPUTE], link_s),
        reason=(
            f"the longer of computing and {units.num_bytes(sent)} over the link, "
            f"{units.seconds(link_s)}, where all gradients are sent"
        ),
    )
