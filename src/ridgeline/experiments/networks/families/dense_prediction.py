"""Segmentation and detection: a prediction for each pixel, or boxes at several resolutions."""

import importlib
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.experiments.networks.network import Parts, Scale, adamw, network, sgd

SEGMENTATION, DETECTION = "segmentation", "detection"
FOCAL_POWER, FOCAL_WEIGHT = 2.0, 0.25
"""Source: Lin et al., Focal Loss for Dense Object Detection (2017), section 4.1."""


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions with batch normalisation and ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, with connections across: images to classes of pixels.

    Source: Ronneberger et al., U-Net (2015).
    """

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            # Not strict: the last width is the input of no level.
            double_convolution(a, b)
            for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.joined = nn.ModuleList(double_convolution(2 * w, w) for w in reversed(widths[:-1]))
        self.output = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, classes, H, W]."""
        kept: list[Tensor] = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for up, joined, across in zip(self.up, self.joined, reversed(kept[:-1]), strict=True):
            x = joined(torch.cat([across, up(x)], 1))
        return self.output(x)


class Detector(nn.Module):
    """A backbone, a feature pyramid and heads that all levels share: classes and boxes of each place.

    Source: Lin et al., Feature Pyramid Networks (2017), and RetinaNet's heads (2017), an anchor a place.
    """

    def __init__(self, width: int, pyramid: int, classes: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 4, 3), nn.BatchNorm2d(width), nn.ReLU())
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
                          double_convolution(b, b))
            for a, b in itertools.pairwise(widths)
        )  # fmt: skip
        self.lateral = nn.ModuleList(nn.Conv2d(w, pyramid, 1) for w in widths[1:])
        self.classes = _head(pyramid, classes)
        self.boxes = _head(pyramid, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images to logits [N, places, classes] and boxes [N, places, 4], all levels joined."""
        x = self.stem(x)
        features: list[Tensor] = []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            features.append(lateral(x))
        for level in range(len(features) - 1, 0, -1):
            upper = nn.functional.interpolate(features[level], scale_factor=2.0, mode="nearest")
            features[level - 1] = features[level - 1] + upper
        logits = [self.classes(level).flatten(2).transpose(1, 2) for level in features]
        boxes = [self.boxes(level).flatten(2).transpose(1, 2).exp() for level in features]
        return torch.cat(logits, 1), torch.cat(boxes, 1)


def _head(width: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, outputs, 3, padding=1))


def pixel_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of pixels, and one minus the overlap of soft masks (Dice)."""
    images, labels = batch
    logits = model(images)
    # Models of torchvision return a dict.
    logits = logits["out"] if isinstance(logits, dict) else logits
    # In float32: sums over all pixels need more digits than 16 bits have.
    soft = logits.float().softmax(1)
    wanted = nn.functional.one_hot(labels, logits.shape[1]).movedim(3, 1).to(soft.dtype)
    common = 2.0 * (soft * wanted).sum((0, 2, 3))
    dice = (common + 1.0) / (soft.sum((0, 2, 3)) + wanted.sum((0, 2, 3)) + 1.0)
    return nn.functional.cross_entropy(logits, labels) + 1.0 - dice.mean()


def detection_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Focal loss over all places, and the loss of boxes at those that hold an object."""
    images, classes, boxes = batch
    logits, found = model(images)
    logits, found = logits.float(), found.float()
    is_object = classes > 0
    wanted = nn.functional.one_hot(classes, logits.shape[2] + 1)[..., 1:].to(logits.dtype)
    plain = nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    right = torch.sigmoid(logits) * wanted + (1 - torch.sigmoid(logits)) * (1 - wanted)
    weight = FOCAL_WEIGHT * wanted + (1 - FOCAL_WEIGHT) * (1 - wanted)
    # A batch without objects would divide by nothing.
    count = is_object.sum().clamp(min=1)
    focal = (weight * (1 - right) ** FOCAL_POWER * plain).sum() / count
    # As a product with the mask: the number of objects stays on the device.
    miss = nn.functional.smooth_l1_loss(found, boxes, reduction="none").sum(2)
    return focal + (miss * is_object).sum() / count


def _masks(
    count: int, side: int, classes: int
) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pixels = torch.randn(count, 3, side, side, generator=generator)
        return pixels, torch.randint(0, classes, (count, side, side), generator=generator)

    return draw


@network(
    SEGMENTATION,
    "U-Net of 4 levels, cross entropy and Dice, batch 16 of 256 x 256",
    adamw,
    several_workers=True,
)
def _unet(scale: Scale) -> Parts:
    width, levels, count, side = (64, 4, 16, 256) if scale == "gpu" else (8, 3, 2, 32)
    return Parts(lambda: UNet(width, levels, 8), _masks(count, side, 8), pixel_loss)


@network(
    SEGMENTATION,
    "torchvision's fcn_resnet50, a dict as output, batch 16 of 256 x 256",
    sgd,
    needs=("torchvision",),
)
def _fcn_resnet50(scale: Scale) -> Parts:
    segmentation = "torchvision.models.segmentation"
    if scale == "gpu":

        def published() -> nn.Module:
            make = importlib.import_module(segmentation).fcn_resnet50
            return make(weights=None, weights_backbone=None, num_classes=21)

        return Parts(published, _masks(16, 256, 21), pixel_loss)

    def small() -> nn.Module:
        fcn = importlib.import_module(segmentation).fcn
        backbone = _NamedOutput(double_convolution(3, 32))
        return fcn.FCN(backbone, fcn.FCNHead(32, 5))

    return Parts(small, _masks(2, 32, 5), pixel_loss)


class _NamedOutput(nn.Module):
    """A backbone whose features have the name that torchvision's heads look for."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Features under `out`."""
        return {"out": self.body(x)}


@network(
    DETECTION, "feature pyramid with shared heads, focal and box loss, batch 16 of 512 x 512", sgd
)
def _detector(scale: Scale) -> Parts:
    width, pyramid, count, side, classes = (
        (64, 256, 16, 512, 80) if scale == "gpu" else (8, 16, 2, 64, 5)
    )
    places = sum((side // stride) ** 2 for stride in (8, 16, 32))

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        pixels = torch.randn(count, 3, side, side, generator=generator)
        found = torch.randint(0, classes + 1, (count, places), generator=generator)
        # As few as in photographs, for which focal loss was made.
        is_object = torch.rand(count, places, generator=generator) < 0.02
        return pixels, found * is_object, torch.rand(count, places, 4, generator=generator)

    return Parts(lambda: Detector(width, pyramid, classes), draw, detection_loss)


NETWORKS = (_unet, _fcn_resnet50, _detector)
