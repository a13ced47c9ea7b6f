"""`Network`: a short description of something to train, from which a model, its loss and a batch are made."""

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.experiments.draws import Draw, seeded
from ridgeline.tensors.moving import move_nest

Scale = Literal["gpu", "cpu"]
LossFunction = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[..., Optimizer]
"""From an iterable of parameters, and keyword arguments such as `fused`."""


class Parts(NamedTuple):
    """What a network consists of in one scale.

    Attributes:
        make_model: Makes the model in float32 on torch's default device, from the present random state.
        make_batch: Draws one batch of made-up data on the CPU from a generator.
        loss_fn: The mean loss of a batch.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Draw
    loss_fn: LossFunction


class Setup(NamedTuple):
    """A network that is ready to be trained: the four things that a training loop needs."""

    model: nn.Module
    loss_fn: LossFunction
    optimizer: Optimizer
    batch: Any


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network of the catalog.

    Attributes:
        name: Unique.
        kind: What it stands for; the catalog has several of most kinds.
        title: Sizes in the scale for GPUs.
        parts: From a scale: `gpu` as published, `cpu` so small that two cores take under 100 ms a step.
        make_optimizer: Its optimizer.
        needs: Packages that must be installed.
        clip_norm: The total norm that the loop clips gradients to; None: it does not.
        is_sparse: Whether some gradients are sparse tensors, which fused optimizers do not take.
        several_workers: Whether it takes part where several workers train together.
    """

    name: str
    kind: str
    title: str
    parts: Callable[[Scale], Parts]
    make_optimizer: MakeOptimizer
    needs: tuple[str, ...] = ()
    clip_norm: float | None = None
    is_sparse: bool = False
    several_workers: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages it needs that are not installed."""
        return tuple(name for name in self.needs if importlib.util.find_spec(name) is None)

    def build(
        self, device: str | torch.device, scale: Scale, *, rank: int = 0, **options: Any
    ) -> Setup:
        """The network, the same each time: weights and data come from fixed seeds, the random state stays.

        Args:
            device: Where.
            scale: How large.
            rank: Of the worker, for which other data is drawn.
            **options: For the optimizer, e.g. `fused=True`.
        """
        parts = self.parts(scale)
        device = torch.device(device)
        with seeded(device), device:
            model = parts.make_model()
        # What a constructor makes on a device of its own choice is moved.
        model.to(device).train()
        # Drawn on the CPU, whose generator gives the same data wherever the network runs.
        batch = parts.make_batch(torch.Generator().manual_seed(1 + rank))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = self.make_optimizer(trained, **options)
        return Setup(model, parts.loss_fn, optimizer, move_nest(device, batch))


def network(
    kind: str, title: str, make_optimizer: MakeOptimizer, **settings: Any
) -> Callable[[Callable[[Scale], Parts]], Network]:
    """Makes a network of the function below it, which gives the parts.

    Args:
        kind: Of the network.
        title: Of the network.
        make_optimizer: Of the network.
        **settings: Its further fields.
    """

    def described(parts: Callable[[Scale], Parts]) -> Network:
        # Called as the function is, so that no second name can differ.
        name = getattr(parts, "__name__", "").removeprefix("_")
        return Network(
            name=name,
            kind=kind,
            title=title,
            parts=parts,
            make_optimizer=make_optimizer,
            **settings,
        )

    return described


sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=5e-5)
"""As image classifiers are trained with, its rate small: small differences stay small."""
adam = partial(torch.optim.Adam, lr=3e-4)
adamw = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.05)
"""As transformers are trained with."""


def token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy of logits [N, T, classes] and labels [N, T], which come behind the inputs."""
    *inputs, labels = batch
    logits = model(*inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def perceptron(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    # Logits are not activated.
    return nn.Sequential(*layers[:-1])
