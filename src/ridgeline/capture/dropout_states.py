"""The memory in which cuDNN's recurrent layers draw what they drop out.

torch has one tensor for it on each GPU, which Python does not see. Whenever the GPU's generator is seeded or
its state is set, the next recurrent layer that drops something out makes another one and frees the first. A
CUDA graph continues to draw from the first: so the capturing code holds it, and gives it the values of the
other before a replay, for the draws of the layer as it is written.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.reach.reach import Reach

SEEDED = "the first step after each seed ran without a graph: recurrent layers with dropout start again in it"


class DropoutStates:
    """What a capture of steps holds as long as its graph, and keeps as eager layers would have it.

    To be made right before the capture; after it nothing sets a generator until that has ended.

    Args:
        modules: All that the step may call, those inside others included.

    Attributes:
        held: One for each GPU with a recurrent layer that drops something out, about 2 MB; none without.

    A generator that was seeded is noticed by its seed, or by an offset that is less than replays left it at:
    one that is set to a later place of the same sequence is not. A replay afterwards makes torch's new state
    before all else that it draws, an eager step at its first such layer: with other dropout before that,
    their numbers differ. Callers that need eager's run the first step after a seed eagerly: `are_seeded`.

    Cost: Where there are such layers, one of width 1 runs on each of their GPUs, now and after each seeding.
        It draws from torch's generator as the step's first such layer would have.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        states = {device: dropout_state(device) for device in dropping_devices(modules)}
        self.held = [
            HeldState(device, state, state, _place(device))
            for device, state in states.items()
            if state is not None
        ]

    def are_seeded(self) -> bool:
        """Whether a generator was seeded since the last replay, so that layers make their state again."""
        return any(held.is_seeded() for held in self.held)

    def bring(self) -> None:
        """Before a replay: the states are those that layers run one by one would draw from now."""
        for held in self.held:
            held.bring()

    def leave(self) -> None:
        """After a replay: layers that run one by one continue where it ended.

        Cost: Nothing until a generator is seeded; then copies of 2 MB on the GPU, here and in `bring`.
        """
        for held in self.held:
            held.leave()

    def adopt(self) -> None:
        """After `left_as_found`: replays continue from the state that torch's layers now draw from."""
        for held in self.held:
            held.adopt()


@dataclass
class HeldState:
    """That of one GPU.

    Attributes:
        state: What the graph draws from.
        torchs: What torch's layers draw from now; `state` itself until a generator is seeded.
        place: Seed and offset of the generator after the last replay.
    """

    device: torch.device
    state: Tensor
    torchs: Tensor
    place: tuple[int, int]

    def adopt(self) -> None:
        """See `DropoutStates`."""
        made = dropout_state(self.device)
        self.torchs = self.state if made is None else made
        self.place = _place(self.device)

    def is_seeded(self) -> bool:
        """See `DropoutStates.are_seeded`."""
        # The generator's own notes: there is no other sign that cuDNN's state was dropped.
        seed, offset = _place(self.device)
        return seed != self.place[0] or offset < self.place[1]

    def bring(self) -> None:
        """See `DropoutStates`."""
        if self.is_seeded():
            self.adopt()
        if self.torchs is not self.state:
            self.state.copy_(self.torchs)

    def leave(self) -> None:
        """See `DropoutStates`."""
        if self.torchs is not self.state:
            self.torchs.copy_(self.state)
        self.place = _place(self.device)


def _place(device: torch.device) -> tuple[int, int]:
    generator = torch.cuda.default_generators[device.index]
    return generator.initial_seed(), generator.get_offset()


@contextlib.contextmanager
def left_as_found(*roots: Any) -> Iterator[set[torch.device]]:
    """What happens meanwhile leaves no trace in what recurrent layers drop out afterwards, nor in generators.

    Otherwise putting a generator back makes the next such layer begin again.

    Args:
        roots: Where modules are that draw, see `Reach`.

    Yields:
        The GPUs with such layers.

    Cost: Finding them; with such layers on a GPU a copy of 2 MB and a layer of width 1, twice.
    """
    found: list[tuple[torch.device, tuple[int, int], Tensor | None]] = []
    devices = dropping_devices(Reach(*roots).modules)
    for device in devices:
        place = _place(device)
        state = dropout_state(device)
        if state is not None:
            # A generator that was set before is set again: whatever is made of it, the next step draws first.
            is_made = _place(device) != place
            found.append((device, place, None if is_made else state.clone()))
    try:
        yield devices
    finally:
        for device, place, values in found:
            # The state was due to be made again: setting the generator has the next layer do so.
            if values is None:
                _set(torch.cuda.default_generators[device.index], place)
                continue
            state = dropout_state(device)
            if state is not None:
                state.copy_(values)
            _put_back(device, place)


def dropping_devices(modules: Iterable[nn.Module]) -> set[torch.device]:
    """The GPUs with recurrent layers that drop something out."""
    return {
        parameter.device
        for module in modules
        if isinstance(module, nn.RNNBase) and module.training and module.dropout > 0.0
        for parameter in module.parameters()
        if parameter.is_cuda
    }


def _put_back(device: torch.device, place: tuple[int, int]) -> None:
    """Set seed and offset of a GPU's generator without having recurrent layers begin again.

    torch notes that in the generator by which a state is set, and generators can share one.
    """
    sharing = torch.Generator(device)
    sharing.graphsafe_set_state(torch.cuda.default_generators[device.index].graphsafe_get_state())
    _set(sharing, place)


def _set(generator: torch.Generator, place: tuple[int, int]) -> None:
    """Set seed and offset, after which recurrent layers that draw by this generator begin again."""
    generator.manual_seed(place[0])
    generator.set_offset(place[1])


def dropout_state(device: torch.device) -> Tensor | None:
    """That of one GPU, made again where its generator was set; None where it does without cuDNN."""
    begin = torch.zeros(1, 1, 1, device=device, dtype=torch.float32)
    # The layer's weights lie in one piece of memory, without which torch warns; they need no values.
    layer = nn.LSTM(1, 1, bias=False, device="meta", dtype=torch.float32).to_empty(device=device)
    weights: list[Tensor] = [*layer.parameters()]
    with DropoutStateSeen() as seen, torch.no_grad(), torch.autocast(device.type, enabled=False):
        # The smallest layer that makes the state: torch shows it to operators alone.
        torch.lstm(begin, (begin, begin), weights, False, 1, 0.5, True, False, False)
    return seen.state


class DropoutStateSeen(TorchDispatchMode):
    """Keeps the state that the last recurrent layer of cuDNN under it was called with, in `state`."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._cudnn_rnn.default:  # noqa: SLF001 - it has no public name
            self.state = args[-1]
        return func(*args, **(kwargs or {}))
