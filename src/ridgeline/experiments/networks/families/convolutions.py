"""Image classifiers written here: plain, depthwise and grouped convolutions, three dimensions, a ViT."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ridgeline.experiments.draws import images, labelled
from ridgeline.experiments.networks.families.torchvision_classifiers import (
    DEPTHWISE,
    GROUPED,
    PLAIN,
    VISION_TRANSFORMER,
)
from ridgeline.experiments.networks.network import Parts, Scale, adamw, network, sgd
from ridgeline.tasks.images import cross_entropy
from ridgeline.tasks.resnet18 import ResNet18


class SeparableBlock(nn.Sequential):
    """Depthwise 3x3 and pointwise convolution, each normalised: [N, C, H, W] to [N, C', H', W'].

    Source: Howard et al., MobileNets (2017), figure 3.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU6(),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(),
        )


class GroupedBlock(nn.Module):
    """1x1, grouped 3x3, 1x1 with group normalisation and a gate on channels, added to what came in."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.GroupNorm(groups, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False),
            nn.GroupNorm(groups, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 1),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to the same."""
        y = self.body(x)
        return x + y * self.gate(y)


def separable_network(width: int, repeats: int, classes: int) -> nn.Module:
    """A MobileNet: a stem, separable blocks of growing width, a mean, a classifier."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)]
    # The first stage keeps the resolution that the stem has left.
    for stage in range(3):
        layers.append(SeparableBlock(width, 2 * width, stride=1 if stage == 0 else 2))
        width *= 2
        layers += [SeparableBlock(width, width, stride=1) for _ in range(repeats)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, classes)
    )


def grouped_network(width: int, groups: int, repeats: int, classes: int) -> nn.Module:
    """Grouped blocks at three resolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
    for _ in range(3):
        layers += [GroupedBlock(width, groups) for _ in range(repeats)]
        layers += [nn.Conv2d(width, 2 * width, 2, 2)]
        width *= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def video_network(width: int) -> nn.Module:
    """Convolutions over time, height and width: [N, 3, T, H, W] to [N, 10]."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (width, 2 * width, 4 * width):
        layers += [
            nn.Conv3d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm3d(outputs),
            nn.ReLU(),
            nn.MaxPool3d(2),
        ]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(inputs, 10))


@dataclass(frozen=True)
class ViTSizes:
    """Sizes of a vision transformer: image and patch side, width, blocks and heads."""

    side: int
    patch: int
    width: int
    blocks: int
    heads: int


class SmallViT(nn.Module):
    """Patches through torch's own encoder layers: [N, 3, side, side] to logits.

    Source: Dosovitskiy et al., An Image is Worth 16x16 Words (2021), with a mean instead of a class token.
    """

    def __init__(self, sizes: ViTSizes, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.width, sizes.patch, sizes.patch)
        self.positions = nn.Parameter(
            0.02 * torch.randn((sizes.side // sizes.patch) ** 2, sizes.width)
        )
        layer = nn.TransformerEncoderLayer(
            sizes.width,
            sizes.heads,
            4 * sizes.width,
            dropout=0.1,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        # Torch nests no tensors with `norm_first`, and would warn.
        self.encoder = nn.TransformerEncoder(layer, sizes.blocks, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(sizes.width)
        self.classifier = nn.Linear(sizes.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.classifier(self.norm(self.encoder(tokens)).mean(1))


@network(DEPTHWISE, "MobileNet-like, batch 128 of 160 x 160", sgd)
def _separable_cnn(scale: Scale) -> Parts:
    if scale == "gpu":
        return Parts(lambda: separable_network(64, 3, 1000), images(128, 160, 1000), cross_entropy)
    return Parts(lambda: separable_network(16, 1, 10), images(8, 32, 10), cross_entropy)


@network(GROUPED, "grouped convolutions, group normalisation, gates, batch 64 of 224 x 224", adamw)
def _grouped_cnn(scale: Scale) -> Parts:
    if scale == "gpu":
        return Parts(lambda: grouped_network(96, 8, 3, 1000), images(64, 224, 1000), cross_entropy)
    return Parts(lambda: grouped_network(16, 4, 1, 10), images(8, 32, 10), cross_entropy)


@network(PLAIN, "ResNet-18 for small images, batch 512 of 32 x 32", sgd, several_workers=True)
def _resnet18_small_images(scale: Scale) -> Parts:
    count, side = (512, 32) if scale == "gpu" else (2, 8)
    return Parts(lambda: ResNet18(10, in_channels=3), images(count, side, 10), cross_entropy)


@network("video", "convolutions in three dimensions, batch 16 of 16 x 112 x 112", sgd)
def _video_cnn(scale: Scale) -> Parts:
    width, count, frames, side = (32, 16, 16, 112) if scale == "gpu" else (4, 2, 8, 16)

    draw = labelled(count, 3, frames, side, side, classes=10)
    return Parts(lambda: video_network(width), draw, cross_entropy)


@network(
    VISION_TRANSFORMER,
    "ViT-S/16 of torch's encoder layers with dropout, batch 128 of 224 x 224",
    adamw,
)
def _vit_small(scale: Scale) -> Parts:
    if scale == "gpu":
        return Parts(
            lambda: SmallViT(ViTSizes(224, 16, 384, 12, 6), 1000),
            images(128, 224, 1000),
            cross_entropy,
        )
    return Parts(lambda: SmallViT(ViTSizes(32, 8, 64, 2, 4), 10), images(4, 32, 10), cross_entropy)


NETWORKS = (_resnet18_small_images, _separable_cnn, _grouped_cnn, _video_cnn, _vit_small)
