"""What is executed: a model with its inputs, called or trained, in the size that a device is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.execution import Purpose
from ridgeline.experiments.draws import Draw, labelled, next_tokens, seeded
from ridgeline.plan import Precision
from ridgeline.tasks.gpt2 import GPT2, GPT2Config, next_token_loss
from ridgeline.tasks.images import cross_entropy
from ridgeline.tasks.mlp import perceptron
from ridgeline.tasks.resnet18 import ResNet18

MODELS = ("mlp", "resnet18", "gpt2")
NUM_BATCHES = 4
ONE_THREAD = ", 1 thread"
"""On a CPU: threads that wait for a busy core would cost more than these sizes can gain from them."""
SMALL_GPT2 = GPT2Config(
    vocabulary_size=256, context_length=64, num_blocks=2, num_heads=4, width=128
)
"""For CPUs, where the model of 124 million parameters would take minutes a step."""


@dataclass(frozen=True, kw_only=True)
class HybridCase:
    """One model, called or trained.

    Attributes:
        model: Name of the model.
        purpose: `callable` (inference) or `step` (training).
        title: Sizes and settings, for the heading.
        device: `cpu` or `cuda`.
        make_model: Makes it on torch's default device in float32, from the present random state.
        make_batch: Makes a batch of random data on the CPU from a generator; inference takes the tuple
            as the positional inputs.
        loss_fn: Of a training step.
        make_optimizer: Of a training step, from the model and further keyword arguments.
        precision: Of a training step; inference in bf16 has its weights in bf16.
        calls: Calls in a turn; 0: as many as fill a turn.
        threads: For torch on the CPU; 0: as many as there are.
        compile_s: What compiling once takes about, to keep to the time limit.
        is_cold: Whether every contender compiles with an empty cache; else the first fills it for all.
        weight: Share of the time limit.
    """

    model: str
    purpose: Purpose
    title: str
    device: str
    make_model: Callable[[], nn.Module]
    make_batch: Draw
    loss_fn: Callable[[nn.Module, Any], Tensor] = cross_entropy
    make_optimizer: Callable[..., Optimizer] = field(default=torch.optim.SGD)
    precision: Precision = "as-is"
    calls: int = 0
    threads: int = 0
    compile_s: float = 15.0
    is_cold: bool = False
    weight: float = 1.0

    def model_on_device(self) -> nn.Module:
        """A model with the same weights each time, ready for its purpose."""
        device = torch.device(self.device)
        with seeded(device), device:
            model = self.make_model()
        if self.purpose == "callable":
            # Else dropout draws and batch norm changes its statistics: no two calls would agree.
            model.eval()
            if self.precision == "bf16":
                model.to(torch.bfloat16)
        if self.device == "cuda" and any(p.dim() == 4 for p in model.parameters()):
            # What tensor cores want of convolutions.
            nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
        return model

    def batches(self) -> list[tuple[Tensor, ...]]:
        """A few different batches on the device."""
        generator = torch.Generator().manual_seed(1)
        return [
            tuple(self._placed(tensor) for tensor in self.make_batch(generator))
            for _ in range(NUM_BATCHES)
        ]

    def _placed(self, tensor: Tensor) -> Tensor:
        if self.purpose == "callable" and self.precision == "bf16" and tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        if self.device == "cuda" and tensor.dim() == 4:
            tensor = tensor.to(memory_format=torch.channels_last)
        return tensor.to(self.device)


def cases(device: str, *, quick: bool, only: Sequence[str] = MODELS) -> list[HybridCase]:
    """The cases for a device, in the order of `MODELS`."""
    chosen: list[HybridCase] = []
    if "mlp" in only:
        chosen += _perceptrons(device)
    if "resnet18" in only:
        chosen += _residual_networks(device, quick=quick)
    if "gpt2" in only and (device == "cuda" or not quick):
        chosen += _transformers(device)
    return chosen


def left_out(device: str, *, quick: bool, only: Sequence[str] = MODELS) -> tuple[str, ...]:
    """The models that were asked for and are not run, each with its reason."""
    if "gpt2" in only and device == "cpu" and quick:
        return ("gpt2: left out of the quick experiment on a CPU, where it compiles for minutes",)
    return ()


def _perceptrons(device: str) -> list[HybridCase]:
    """The seeds' experiment, and a training step in which launching and dispatching is everything."""
    on_gpu = device == "cuda"
    shared = {"model": "mlp", "device": device, "compile_s": 10.0, "threads": 0 if on_gpu else 1}
    suffix = "" if on_gpu else ONE_THREAD
    return [
        HybridCase(
            **shared,
            purpose="callable",
            title=f"512-256-128-2, batch 1, float32{suffix}",
            weight=1.5,
            make_model=lambda: perceptron(512, 2, hidden_sizes=(256, 128)),
            make_batch=lambda generator: (torch.randn(1, 512, generator=generator),),
            # The seeds' number, so that these figures can be held against theirs.
            calls=1000,
        ),
        HybridCase(
            **shared,
            weight=2.0,
            purpose="step",
            title=f"64-64-64-10, batch 8, Adam, float32{suffix}",
            make_model=lambda: perceptron(64, 10, hidden_sizes=(64, 64)),
            make_batch=labelled(8, 64, classes=10),
            make_optimizer=_adam,
        ),
    ]


def _residual_networks(device: str, *, quick: bool) -> list[HybridCase]:
    on_gpu = device == "cuda"
    side, precision = (28, "bf16") if on_gpu else (8, "as-is")
    layout = "bf16, channels_last" if on_gpu else f"float32{ONE_THREAD}"
    base = HybridCase(
        model="resnet18",
        purpose="step",
        title="",
        device=device,
        make_model=lambda: ResNet18(10),
        make_batch=labelled(4, 1, side, side, classes=10),
        make_optimizer=_sgd,
        precision=precision,
        threads=0 if on_gpu else 1,
        compile_s=40.0,
        weight=2.0,
    )
    sizes = (32, 1024, 256) if on_gpu else (4,)
    trained = [
        replace(
            base,
            title=f"{side}x{side}x1, batch {size}, SGD with momentum, {layout}",
            make_batch=labelled(size, 1, side, side, classes=10),
            # Later sizes find most kernels in the cache.
            weight=2.0 if index == 0 else 1.2,
        )
        for index, size in enumerate(sizes)
    ]
    if quick:
        return [replace(trained[0], weight=2.0 if on_gpu else 0.5)]
    size = 32 if on_gpu else 4
    called = replace(
        base,
        purpose="callable",
        title=f"{side}x{side}x1, batch {size}, {layout}",
        make_batch=_without_labels(labelled(size, 1, side, side, classes=10)),
        weight=1.0,
    )
    return [called, *trained]


def _transformers(device: str) -> list[HybridCase]:
    on_gpu = device == "cuda"
    config = GPT2Config() if on_gpu else SMALL_GPT2
    batch = 8 if on_gpu else 4
    length = config.context_length
    size = "124M" if on_gpu else f"{config.num_blocks} blocks of width {config.width}, 256 tokens"
    title = f"{size}, {batch} x {length} tokens"
    kind = "bf16" if on_gpu else f"float32{ONE_THREAD}"
    # Bytes, as the task has them, however large the vocabulary is.
    draw = next_tokens(batch, length, 256)
    base = HybridCase(
        model="gpt2",
        purpose="callable",
        title=f"{title}, {kind}",
        device=device,
        make_model=lambda: GPT2(config),
        make_batch=_without_labels(draw),
        precision="bf16" if on_gpu else "as-is",
        threads=0 if on_gpu else 1,
        compile_s=40.0 if on_gpu else 15.0,
        weight=1.0,
    )
    trained = replace(
        base,
        purpose="step",
        title=f"{title}, AdamW, {kind}",
        make_batch=draw,
        loss_fn=next_token_loss,
        make_optimizer=_adamw,
        weight=2.0,
    )
    return [base, trained]


def _without_labels(draw: Draw) -> Draw:
    return lambda generator: draw(generator)[:1]


def _adam(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, **options)


def _sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, **options)


def _adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, **options
    )
