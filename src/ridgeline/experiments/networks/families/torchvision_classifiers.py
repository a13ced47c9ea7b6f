"""Image classifiers of torchvision: plain, depthwise and grouped convolutions, and vision transformers."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ridgeline.experiments.draws import images
from ridgeline.experiments.networks.network import MakeOptimizer, Network, Parts, Scale, adamw, sgd
from ridgeline.tasks.images import cross_entropy

CLASSES = 1000
SIDE = 224
"""Height and width of ImageNet's images."""
FEW = 10


# By name: a catalog is listed where torchvision is not installed, too.
def models() -> Any:
    """`torchvision.models`, imported when it is needed."""
    return importlib.import_module("torchvision.models")


def _resnet(block_counts: list[int], classes: int, **options: Any) -> nn.Module:
    resnet = models().resnet
    return resnet.ResNet(resnet.Bottleneck, block_counts, num_classes=classes, **options)


def _small_vgg() -> nn.Module:
    vgg = models().vgg
    layers = [16, "M", 32, "M", 64, 64, "M", 64, 64, "M"]
    model = vgg.VGG(vgg.make_layers(layers), num_classes=FEW, init_weights=True)
    # Images of 32 x 32 leave 2 x 2 places, for which the published classifier is too large.
    model.avgpool = nn.AdaptiveAvgPool2d((2, 2))
    model.classifier = nn.Sequential(
        nn.Linear(256, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, FEW)
    )
    return model


def _small_densenet() -> nn.Module:
    return models().DenseNet(
        growth_rate=8, block_config=(2, 3, 2), num_init_features=16, num_classes=FEW
    )


def _small_efficientnet() -> nn.Module:
    block = partial(models().efficientnet.MBConvConfig, width_mult=0.5, depth_mult=0.5)
    settings = [block(1, 3, 1, 32, 16, 1), block(6, 3, 2, 16, 24, 2), block(6, 5, 2, 24, 40, 2)]
    return models().EfficientNet(settings, dropout=0.2, num_classes=FEW, last_channel=128)


def _small_convnext() -> nn.Module:
    block = models().convnext.CNBlockConfig
    settings = [block(16, 32, 2), block(32, 64, 2), block(64, None, 2)]
    return models().ConvNeXt(settings, stochastic_depth_prob=0.1, num_classes=FEW)


def _small_vit() -> nn.Module:
    return models().VisionTransformer(
        image_size=32,
        patch_size=4,
        num_layers=3,
        num_heads=4,
        hidden_dim=96,
        mlp_dim=192,
        num_classes=FEW,
    )


def _small_swin() -> nn.Module:
    return models().SwinTransformer(
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.1,
        num_classes=FEW,
    )


def _small_regnet() -> nn.Module:
    settings = models().regnet.BlockParams.from_init_params(
        depth=4, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25
    )
    return models().RegNet(settings, num_classes=FEW)


def _small_shufflenet() -> nn.Module:
    return models().ShuffleNetV2([1, 2, 1], [8, 16, 32, 64, 64], num_classes=FEW)


Make = Callable[[], nn.Module]


def _classifier(
    name: str,
    kind: str,
    batch: int,
    small: Make,
    *,
    make_optimizer: MakeOptimizer = sgd,
    several_workers: bool = False,
) -> Network:
    """A network of torchvision in its published size, and a small one of the same blocks."""

    def parts(scale: Scale) -> Parts:
        if scale == "gpu":
            return Parts(
                lambda: getattr(models(), name)(num_classes=CLASSES),
                images(batch, SIDE, CLASSES),
                cross_entropy,
            )
        return Parts(small, images(4, 32, FEW), cross_entropy)

    return Network(
        name=name,
        kind=kind,
        title=f"torchvision's {name}, batch {batch} of {SIDE} x {SIDE}",
        parts=parts,
        make_optimizer=make_optimizer,
        needs=("torchvision",),
        several_workers=several_workers,
    )


PLAIN, DEPTHWISE, GROUPED = (
    "classifier, plain convolutions",
    "classifier, depthwise convolutions",
    "classifier, grouped convolutions",
)
VISION_TRANSFORMER = "vision transformer"

NETWORKS = (
    _classifier("resnet50", PLAIN, 128, partial(_resnet, [1, 1, 1, 1], FEW), several_workers=True),
    _classifier("vgg16", PLAIN, 64, _small_vgg, several_workers=True),
    _classifier("densenet121", PLAIN, 64, _small_densenet),
    _classifier(
        "mobilenet_v2",
        DEPTHWISE,
        128,
        lambda: models().mobilenet_v2(width_mult=0.35, num_classes=FEW),
    ),
    _classifier("efficientnet_b0", DEPTHWISE, 128, _small_efficientnet),
    _classifier("convnext_tiny", DEPTHWISE, 64, _small_convnext, make_optimizer=adamw),
    _classifier(
        "resnext50_32x4d",
        GROUPED,
        128,
        partial(_resnet, [1, 1, 1, 1], FEW, groups=8, width_per_group=4),
    ),
    _classifier("regnet_y_1_6gf", GROUPED, 128, _small_regnet),
    _classifier("shufflenet_v2_x1_0", DEPTHWISE, 256, _small_shufflenet),
    _classifier(
        "vit_b_16", VISION_TRANSFORMER, 64, _small_vit, make_optimizer=adamw, several_workers=True
    ),
    _classifier("swin_t", VISION_TRANSFORMER, 64, _small_swin, make_optimizer=adamw),
)
