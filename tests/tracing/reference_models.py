"""Published networks, written small, whose FLOP counts and gradient orders are known."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

rows = (torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 4)
"""A batch for `mlp`."""


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def image_batch(size: int, side: int = 224, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Batch of one stored image: what is traced never looks at the values."""
    image = torch.zeros(1, 3, side, side).expand(size, -1, -1, -1)
    return image, torch.arange(size) % classes


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


class Block(nn.Module):
    """Residual block of ResNet: two 3x3 convolutions, or 1x1, 3x3, 1x1 with four times the width."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out = width * 4 if bottleneck else width
        shapes = [(1, 1), (3, stride), (1, 1)] if bottleneck else [(3, stride), (3, 1)]
        widths = [channels, *([width] * (len(shapes) - 1)), out]
        layers: list[nn.Module] = []
        for (kernel, step), before, after in zip(shapes, widths, widths[1:], strict=False):
            convolution = nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
        self.residual = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


def resnet(
    blocks: tuple[int, ...], *, bottleneck: bool, width: int = 64, classes: int = 1000
) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, number in enumerate(blocks):
        for block in range(number):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Block(channels, width << stage, stride, bottleneck=bottleneck))
            channels = (width << stage) * (4 if bottleneck else 1)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def alexnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(nn.AdaptiveAvgPool2d(6), nn.Flatten()),
        *(nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(True)),
        *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, 1000)),
    )


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for repeats, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(4096, 1000))


class EncoderBlock(nn.Module):
    """Attention and MLP with normalisation before each: [N, S, D] to [N, S, D]."""

    def __init__(self, dim: int, heads: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.heads, self.is_causal = heads, is_causal

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer with a class token; the defaults are ViT-B/16."""

    def __init__(self, dim: int = 768, heads: int = 12, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, 197, dim))
        self.blocks = nn.Sequential(*(EncoderBlock(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class TiedLanguageModel(nn.Module):
    """Embedding whose table is also the head; `unused` never is."""

    def __init__(self, words: int = 50, dim: int = 16, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(words, dim)
        self.blocks = nn.Sequential(
            *(EncoderBlock(dim, heads, is_causal=True) for _ in range(depth))
        )
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(dim, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.table(words)))


def language_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["words"])
    return F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten())


def language_batch(size: int = 3, length: int = 7, words: int = 50) -> dict[str, Tensor]:
    stream = torch.arange(size * (length + 1)).view(size, -1) * 7 % words
    return {"words": stream[:, :-1], "next": stream[:, 1:]}
