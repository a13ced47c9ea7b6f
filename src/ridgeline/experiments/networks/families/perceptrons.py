"""Perceptrons, alone and as parts: classifiers, two forward passes, experts, physics by double backward."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.experiments.draws import labelled
from ridgeline.experiments.networks.network import Parts, Scale, adam, adamw, network, perceptron
from ridgeline.tasks.images import cross_entropy

PERCEPTRON, EXPERTS, PHYSICS, CONTRASTIVE = (
    "perceptron",
    "mixture of experts",
    "physics-informed",
    "contrastive",
)
BALANCE = 0.01
"""Weight of the loss that keeps experts equally busy. Source: Fedus et al., Switch Transformers (2021)."""
TEMPERATURE = 0.1


class Routed(NamedTuple):
    """What a layer of experts returns: features, and how unequally the experts were used."""

    features: Tensor
    imbalance: Tensor


class Experts(nn.Module):
    """Each token goes to the two experts that its router prefers; how many come is known only then.

    Source: Shazeer et al., Outrageously Large Neural Networks (2017), top-2 routing.
    """

    def __init__(self, width: int, experts: int, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Routed:
        """Tokens [N, width] to the same."""
        share = self.router(x).float().softmax(1)
        weights, picked = share.topk(self.chosen, dim=1)
        weights = weights / weights.sum(1, keepdim=True)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(picked == number)
            # As usual code has it, though it reads a number that the device computed.
            if token.numel():
                out = expert(x[token]) * weights[token, place, None]
                total = total.index_add(0, token, out.to(total.dtype))
        # By the first choice alone, as the loss of Switch Transformers counts tokens.
        used = nn.functional.one_hot(picked[:, 0], share.shape[1]).float().mean(0)
        return Routed(total, (used * share.mean(0)).sum() * share.shape[1])


class ExpertsModel(nn.Module):
    """Layers of experts with normalisation, added to what came in, and a classifier of tokens."""

    def __init__(self, vocabulary: int, width: int, layers: int, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each token, and the imbalance of all layers."""
        x = self.embedding(tokens)
        imbalance = torch.zeros((), device=x.device)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            routed = layer(norm(x))
            x, imbalance = x + routed.features, imbalance + routed.imbalance
        return self.output(x), imbalance


def routed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy, and a little for experts that are busier than others."""
    logits, imbalance = model(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]) + BALANCE * imbalance


def heat_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """How far a network is from solving the heat equation: its own derivatives, then those of the loss.

    Source: Raissi et al., Physics-Informed Neural Networks (2019).
    """
    inside, at_start = batch
    # A leaf of its own, since derivatives by the inputs are wanted and the batch stays as it is.
    inside = inside.detach().requires_grad_()
    u = model(inside)
    (slope,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 1].sum(), inside, create_graph=True)
    residual = slope[:, 0] - 0.1 * bend[:, 1]
    wanted = torch.sin(torch.pi * at_start[:, 1:])
    return residual.square().mean() + (model(at_start) - wanted).square().mean()


def contrastive_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Two views through the same network; each must find its partner.

    Source: Chen et al., SimCLR (2020), one direction.
    """
    first, second = (nn.functional.normalize(model(view).float(), dim=1) for view in batch)
    labels = torch.arange(first.shape[0], device=first.device)
    return nn.functional.cross_entropy(first @ second.T / TEMPERATURE, labels)


nadam = partial(torch.optim.NAdam, lr=1e-3)
"""Which has no fused form."""


@network(PERCEPTRON, "4 layers of 2048, batch 4096", adam, several_workers=True)
def _mlp(scale: Scale) -> Parts:
    count, width = (4096, 2048) if scale == "gpu" else (32, 128)
    draw = labelled(count, width, classes=10)
    return Parts(lambda: perceptron(width, width, width, width, 10), draw, cross_entropy)


@network(PERCEPTRON, "64-64-64-10, batch 64: a step that is all launching", adam)
def _small_mlp(scale: Scale) -> Parts:
    width = 64 if scale == "gpu" else 32
    draw = labelled(64, width, classes=10)
    return Parts(lambda: perceptron(width, width, width, 10), draw, cross_entropy)


@network(
    EXPERTS, "4 layers of 8 experts, top-2 routing that depends on the data, 8192 tokens", adamw
)
def _mixture_of_experts(scale: Scale) -> Parts:
    vocabulary, width, layers, experts, count = (
        (8000, 512, 4, 8, 8192) if scale == "gpu" else (100, 32, 2, 4, 64)
    )

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, vocabulary, (count,), generator=generator)
        return tokens, torch.randint(0, vocabulary, (count,), generator=generator)

    return Parts(lambda: ExpertsModel(vocabulary, width, layers, experts), draw, routed_loss)


@network(PHYSICS, "5 layers of 256, derivatives twice, 16,384 points", adam)
def _heat_equation(scale: Scale) -> Parts:
    count, width = (16_384, 256) if scale == "gpu" else (64, 32)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inside = torch.rand(count, 2, generator=generator)
        at_start = torch.rand(count // 4, 2, generator=generator)
        at_start[:, 0] = 0.0
        return inside, at_start

    return Parts(
        lambda: perceptron(2, width, width, width, width, 1, activation=nn.Tanh), draw, heat_loss
    )


@network(CONTRASTIVE, "two forward passes of one network, NAdam, batch 1024", nadam)
def _contrastive(scale: Scale) -> Parts:
    count, width = (1024, 1024) if scale == "gpu" else (16, 64)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, width, generator=generator)
        return x, x + 0.1 * torch.randn(count, width, generator=generator)

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 128)
        )

    return Parts(make, draw, contrastive_loss)


NETWORKS = (_mlp, _small_mlp, _mixture_of_experts, _heat_equation, _contrastive)
