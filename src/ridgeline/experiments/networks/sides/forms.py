"""The forms of a step that Ridgeline is compared with: what users write, and what experts write by hand."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ridgeline.errors import CaptureError
from ridgeline.experiments.networks.network import Network, Scale
from ridgeline.experiments.networks.result import COMPILE, FormKind
from ridgeline.experiments.networks.sides.by_hand import whole_step_graph
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.experiments.ways.case import WayRunner
from ridgeline.optimizer_forms import takes_fused_form
from ridgeline.plan import Precision
from ridgeline.reach.second_gradients import second_gradients
from ridgeline.tensors.memory_format import in_channels_last
from ridgeline.workers.world import World

CHANNELS_LAST = "channels-last"


@dataclass(frozen=True, kw_only=True)
class NetworkSubject:
    """A network where and how it is trained.

    Attributes:
        network: The network.
        world: This worker among all.
        scale: How large.
        precision: `bf16` computes under autocast.
    """

    network: Network
    world: World
    scale: Scale
    precision: Precision = "as-is"

    @cached_property
    def is_convolutional(self) -> bool:
        """Whether a channels-last layout means something: there are weights of four dimensions.

        Cost: Makes the model on the host: one on no device cannot read the widths that it computes.
        """
        with torch.random.fork_rng(devices=[]):
            model = self.network.parts(self.scale).make_model()
        return any(parameter.dim() == 4 for parameter in model.parameters())


class NetworkForm(NamedTuple):
    """A way to run a step, and what makes it.

    Attributes:
        name: In tables.
        kind: Plain or by hand.
        make: Builds it, with a model and an optimizer of its own.
    """

    name: str
    kind: FormKind
    make: Callable[[NetworkSubject], WayRunner]


def plain_forms(subject: NetworkSubject) -> list[NetworkForm]:
    """What a user writes: eager, the compiler's defaults, channels-last of both; DDP around them."""
    prefix = "DDP" if subject.world.size > 1 else ""
    forms: list[NetworkForm] = []
    for is_compiled, layout in itertools.product((False, True), _layouts(subject)):
        words = [prefix, COMPILE if is_compiled else "" if prefix else "eager"]
        name = " + ".join(word for word in words if word)
        make = partial(_plain, is_compiled=is_compiled, is_channels_last=bool(layout))
        forms.append(NetworkForm(f"{name}{layout}", "plain", make))
    return forms


def forms_by_hand(subject: NetworkSubject) -> list[NetworkForm]:
    """One CUDA graph around the whole step, of each plain form; nothing on a CPU, or under DDP.

    Compiled ones come first: a capture that fails may spoil the process for those after it.
    """
    if subject.world.device.type != "cuda" or subject.world.size > 1:
        return []
    forms: list[NetworkForm] = []
    for is_compiled, layout in itertools.product((True, False), reversed(_layouts(subject))):
        name = f"graph of {COMPILE if is_compiled else 'eager'}{layout}"
        make = partial(_graph, is_compiled=is_compiled, is_channels_last=bool(layout))
        forms.append(NetworkForm(name, "by hand", make))
    return forms


def _layouts(subject: NetworkSubject) -> tuple[str, ...]:
    """Ends of names: as it is, and in a channels-last layout where that means something."""
    return ("", f", {CHANNELS_LAST}") if subject.is_convolutional else ("",)


def optimizer_options(
    network: Network, device: torch.device, *, is_captured: bool = False
) -> dict[str, bool]:
    """The fastest form that a network's optimizer offers: fused where there is one, and fit for capture.

    Args:
        network: Names its optimizer, and whether its gradients are sparse.
        device: Where the parameters are.
        is_captured: Whether its step goes into a CUDA graph.
    """
    # What an optimizer offers depends on where its parameters are.
    example = network.make_optimizer([nn.Parameter(torch.zeros(1, device=device))])
    group = example.param_groups[0]
    options: dict[str, bool] = {}
    if takes_fused_form(type(example).__name__, group) and not network.is_sparse:
        options["fused"] = True
    if is_captured and "capturable" in group:
        options["capturable"] = True
    return options


def plain_step(
    subject: NetworkSubject, *, is_compiled: bool, is_channels_last: bool, is_captured: bool = False
) -> tuple[PlainStep, Any]:
    """The plain loop's step, and the batch it is for.

    Raises:
        CaptureError: `torch.compile` would not compute its gradients.
    """
    network, world = subject.network, subject.world
    options = optimizer_options(network, world.device, is_captured=is_captured)
    setup = network.build(world.device, subject.scale, rank=world.rank, **options)
    model, batch = setup.model, setup.batch
    # Under autocast torch 2.11 leaves them out without a word, and would be compared by what it did not do.
    if is_compiled and (place := second_gradients(model, setup.loss_fn)):
        raise CaptureError(f"{COMPILE} computes no gradients of gradients: {place}")
    if is_channels_last:
        convert: Any = model.to  # its stubs lack the overload for layouts alone
        convert(memory_format=torch.channels_last)
        batch = pytree.tree_map_only(Tensor, in_channels_last, batch)
    called: Any = model
    if world.size > 1:
        # DDP refuses a list of devices on a CPU.
        devices = [world.device] if world.device.type == "cuda" else None
        called = DistributedDataParallel(model, device_ids=devices)
    if is_compiled:
        # Around DDP, so that the compiler cuts the backward pass where buckets end.
        called = torch.compile(called)
    step = PlainStep(
        model,
        called,
        setup.loss_fn,
        setup.optimizer,
        precision=subject.precision,
        clip_norm=network.clip_norm,
    )
    return step, batch


def _plain(subject: NetworkSubject, *, is_compiled: bool, is_channels_last: bool) -> WayRunner:
    step, batch = plain_step(subject, is_compiled=is_compiled, is_channels_last=is_channels_last)
    return WayRunner(run=lambda: step(batch))


def _graph(subject: NetworkSubject, *, is_compiled: bool, is_channels_last: bool) -> WayRunner:
    step, batch = plain_step(
        subject, is_compiled=is_compiled, is_channels_last=is_channels_last, is_captured=True
    )
    replay = whole_step_graph(step, batch)
    return WayRunner(run=partial(replay, batch), close=replay.close)
