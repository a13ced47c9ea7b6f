"""Networks outside of the catalogue, as strangers have them, for the contest of `benchmarks/networks.py`.

    python benchmarks/networks.py --from benchmarks/more_networks.py --networks siren real_nvp

Nothing was tuned with them. Packages that a network needs are imported when it is made.
"""

import functools
import importlib
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.experiments.draws import images
from ridgeline.experiments.networks.network import Network, Parts, Scale, adam, adamw
from ridgeline.tasks.images import cross_entropy

Pair = tuple[Tensor, Tensor]
WORDS = 2000
NODES, CLASSES = 128, 32
"""Features of a node, and kinds of nodes."""


class Siren(nn.Module):
    """An image as a function of places. Source: Sitzmann et al., SIREN (2020)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        sizes = [2, width, width, width, width]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.out = nn.Linear(width, 3)

    def forward(self, places: Tensor) -> Tensor:
        """Colours at places."""
        for layer in self.layers:
            places = torch.sin(30 * layer(places))
        return self.out(places)


def siren(scale: Scale) -> Parts:
    """Places in [0, 1) and colours."""
    count = 65536 if scale == "gpu" else 32

    def draw(generator: torch.Generator) -> Pair:
        return torch.rand(count, 2, generator=generator), torch.rand(count, 3, generator=generator)

    def loss(model: nn.Module, batch: Pair) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    return Parts(Siren, draw, loss)


class Flow(nn.Module):
    """Affine couplings. Source: Dinh et al., Density estimation using Real NVP (2017)."""

    def __init__(self, size: int = 64, num_steps: int = 8) -> None:
        super().__init__()
        half = size // 2
        self.steps = nn.ModuleList(
            nn.Sequential(
                nn.Linear(half, 256),
                nn.ReLU(),
                nn.Linear(256, 256),
                nn.ReLU(),
                nn.Linear(256, size),
            )
            for _ in range(num_steps)
        )

    def forward(self, x: Tensor) -> Pair:
        """What is normal, and the logarithm of the determinant."""
        log_determinant = x.new_zeros(len(x))
        for number, step in enumerate(self.steps):
            first, second = x.chunk(2, 1)[:: -1 if number % 2 else 1]
            scale, shift = step(first).chunk(2, 1)
            scale = torch.tanh(scale)
            second = second * scale.exp() + shift
            log_determinant = log_determinant + scale.sum(1)
            x = torch.cat([first, second], 1)
        return x, log_determinant


def real_nvp(scale: Scale) -> Parts:
    """The likelihood of normal numbers."""
    count = 4096 if scale == "gpu" else 16

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        z, log_determinant = model(batch)
        return (0.5 * z.square().sum(1) - log_determinant).mean()

    return Parts(Flow, lambda generator: torch.randn(count, 64, generator=generator), loss)


def critic_loss(model: nn.Module, batch: Pair) -> Tensor:
    """With a penalty on gradients. Source: Gulrajani et al., Improved training of WGANs (2017)."""
    real, fake = batch
    share = torch.rand(len(real), 1, 1, 1, device=real.device)
    mixed = (share * real + (1 - share) * fake).requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    penalty = ((gradient.flatten(1).norm(2, 1) - 1) ** 2).mean()
    return model(fake).mean() - model(real).mean() + 10 * penalty


def wgan_gp_critic(scale: Scale) -> Parts:
    """Three calls of a convolutional critic, and gradients of gradients."""
    count = 128 if scale == "gpu" else 4

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for num_in, num_out in ((3, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(num_in, num_out, 4, 2, 1), nn.LeakyReLU(0.2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, 1))

    def draw(generator: torch.Generator) -> Pair:
        real, fake = torch.randn(2, count, 3, 32, 32, generator=generator)
        return real.clone(), fake.clone()

    return Parts(make, draw, critic_loss)


class Convolutions(nn.Module):
    """Three kinds of graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        of_graphs: Any = importlib.import_module("torch_geometric.nn")
        self.first, self.second = of_graphs.GCNConv(NODES, 256), of_graphs.SAGEConv(256, 256)
        self.last = of_graphs.GATv2Conv(256, CLASSES // 4, heads=4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Scores of the kinds of each node."""
        nodes = functional.dropout(self.first(nodes, edges).relu(), 0.5, self.training)
        return self.last(self.second(nodes, edges).relu(), edges)


def pyg_convolutions(scale: Scale) -> Parts:
    """Kinds of the nodes of one graph."""
    num_nodes, num_edges = (20_000, 200_000) if scale == "gpu" else (50, 200)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        nodes = torch.randn(num_nodes, NODES, generator=generator)
        edges = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
        return nodes, edges, torch.randint(0, CLASSES, (num_nodes,), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(*batch[:2]), batch[2])

    return Parts(Convolutions, draw, loss)


class TwoTowers(nn.Module):
    """Images beside their captions. Source: Radford et al., CLIP (2021)."""

    def __init__(self) -> None:
        super().__init__()
        models: Any = importlib.import_module("torchvision.models")
        self.image = models.resnet18(num_classes=256)
        self.embed = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.text = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """How well each image fits each caption."""
        shown = functional.normalize(self.image(image), dim=-1)
        told = functional.normalize(self.text(self.embed(text)).mean(1), dim=-1)
        return self.scale.exp() * shown @ told.T


def two_towers(scale: Scale) -> Parts:
    """Images of 96 by 96 and captions of 32 tokens."""
    count = 128 if scale == "gpu" else 4

    def draw(generator: torch.Generator) -> Pair:
        shown = torch.randn(count, 3, 96, 96, generator=generator)
        return shown, torch.randint(0, 8000, (count, 32), generator=generator)

    def loss(model: nn.Module, batch: Pair) -> Tensor:
        logits = model(*batch)
        labels = torch.arange(len(logits), device=logits.device)
        both = [functional.cross_entropy(each, labels) for each in (logits, logits.T)]
        return (both[0] + both[1]) / 2

    return Parts(TwoTowers, draw, loss)


class Seq2Seq(nn.Module):
    """A decoder that looks back at each step. Source: Bahdanau et al. (2015)."""

    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, size), nn.Embedding(WORDS, size)
        self.encoder = nn.GRU(size, size, batch_first=True)
        self.cell = nn.GRUCell(2 * size, size)
        self.query, self.key = nn.Linear(size, size), nn.Linear(size, size)
        self.score, self.out = nn.Linear(size, 1), nn.Linear(size, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the next words."""
        keys, last = self.encoder(self.source(source))
        state, words = last[0], []
        for step in range(target.shape[1]):
            mixed = torch.tanh(self.query(state)[:, None] + self.key(keys))
            context = (self.score(mixed).softmax(1) * keys).sum(1)
            state = self.cell(torch.cat([self.target(target[:, step]), context], -1), state)
            words.append(self.out(state))
        return torch.stack(words, 1)


def attention_seq2seq(scale: Scale) -> Parts:
    """Sentences of 25 words."""
    size = (64, 25) if scale == "gpu" else (4, 6)

    def draw(generator: torch.Generator) -> Pair:
        source, target = torch.randint(0, WORDS, (2, *size), generator=generator)
        return source.clone(), target.clone()

    def loss(model: nn.Module, batch: Pair) -> Tensor:
        source, target = batch
        words = model(source, target[:, :-1])
        return functional.cross_entropy(words.flatten(0, 1), target[:, 1:].flatten())

    return Parts(Seq2Seq, draw, loss)


def of_timm(name: str, batch: int, side: int) -> Network:
    """A classifier of timm."""

    def parts(scale: Scale) -> Parts:
        timm: Any = importlib.import_module("timm")
        make = functools.partial(timm.create_model, name, num_classes=100)
        return Parts(make, images(batch if scale == "gpu" else 2, side, 100), cross_entropy)

    title = f"{name}, batch {batch} of {side}"
    return Network(
        name=name, kind="timm", title=title, parts=parts, make_optimizer=adamw, needs=("timm",)
    )


def of_transformers(
    name: str, family: str, task: str, size: tuple[int, int], **config: Any
) -> Network:
    """A language model of transformers, with random parameters, that predicts the words it is given.

    Args:
        name: Of the network.
        family: With what the names of its classes begin.
        task: With what that of the model ends.
        size: Sentences a batch, and words a sentence.
        config: What of its configuration is not the default.
    """

    def make() -> nn.Module:
        transformers: Any = importlib.import_module("transformers")
        settings = getattr(transformers, f"{family}Config")(**config)
        made: nn.Module = getattr(transformers, f"{family}For{task}")(settings)
        return made

    def parts(scale: Scale) -> Parts:
        shape = size if scale == "gpu" else (2, 16)

        def draw(generator: torch.Generator) -> Tensor:
            return torch.randint(0, config["vocab_size"], shape, generator=generator)

        return Parts(make, draw, _loss_of_transformers)

    title = f"{name}, {size[0]} x {size[1]}"
    return Network(
        name=name,
        kind="transformers",
        title=title,
        parts=parts,
        make_optimizer=adamw,
        needs=("transformers",),
    )


def _loss_of_transformers(model: nn.Module, words: Tensor) -> Tensor:
    return model(input_ids=words, labels=words).loss


def _named(kind: str, parts: Any, make_optimizer: Any = adam, **others: Any) -> Network:
    name = parts.__name__
    title = name.replace("_", " ")
    return Network(
        name=name, kind=kind, title=title, parts=parts, make_optimizer=make_optimizer, **others
    )


_QWEN = {"vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
         "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
_OPT = {"vocab_size": 16000, "hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048,
        "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 1024}  # fmt: skip
_ELECTRA = {"vocab_size": 8000, "hidden_size": 256, "embedding_size": 128, "num_hidden_layers": 6}
NETWORKS = (
    _named("field", siren),
    _named("flow", real_nvp),
    _named("GAN", wgan_gp_critic),
    _named("graph", pyg_convolutions, needs=("torch_geometric",)),
    _named("contrastive", two_towers, adamw, needs=("torchvision",)),
    _named("recurrent", attention_seq2seq),
    of_timm("levit_128s", 256, 224),
    of_timm("mobilevit_s", 64, 256),
    of_timm("ghostnet_100", 128, 224),
    of_timm("edgenext_small", 64, 224),
    of_timm("resnest14d", 64, 224),
    of_timm("xcit_nano_12_p16_224", 128, 224),
    of_transformers("qwen2_small", "Qwen2", "CausalLM", (8, 512), **_QWEN),
    of_transformers("opt_small", "OPT", "CausalLM", (8, 512), **_OPT),
    of_transformers("electra_small", "Electra", "MaskedLM", (32, 128), **_ELECTRA),
    of_transformers("distilbert", "DistilBert", "MaskedLM", (32, 128), vocab_size=16000),
)
