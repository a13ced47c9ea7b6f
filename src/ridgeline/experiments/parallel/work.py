"""The functions that are parallelised, with their inputs, and `rl.parallelize` as a way to do them.

Each function returns everything it computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline import units
from ridgeline.experiments.ways.case import Way, WayRemarks, WayRunner

NAME = "ridgeline parallelize"
Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A function with its inputs, and the independent pieces that a person would split it into.

    Attributes:
        fn: The whole, as anybody writes it: one thing after the other.
        inputs: Its positional inputs.
        pieces: Functions without arguments; together they do the independent part of the work.
        join: Makes the whole's results of the pieces' results.
    """

    fn: Function
    inputs: tuple[Tensor, ...]
    pieces: tuple[Callable[[], Any], ...]
    join: Callable[[Sequence[Any]], Any] = tuple


def normal(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """The same random values each time, scaled so that products keep their size."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device)


def chain(x: Tensor, num: int) -> Tensor:
    """`num` products, each of the last one's result."""
    weight = x
    for _ in range(num):
        x = torch.tanh(x @ weight)
    return x


def chains(side: int, num: int) -> Work:
    """Two independent chains of `num` products on the CPU."""
    a, b = normal(side, side, seed=1), normal(side, side, seed=2)

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return chain(x, num), chain(y, num)

    return Work(fn=both, inputs=(a, b), pieces=(lambda: chain(a, num), lambda: chain(b, num)))


def squares_on(devices: Sequence[str], side: int, num: int) -> Work:
    """The seeds' experiment: `num` products on each of two devices."""
    inputs = tuple(normal(side, side, device=d, seed=i) for i, d in enumerate(devices))

    def run(x: Tensor) -> list[Tensor]:
        return [x.mm(x) for _ in range(num)]

    return _each(run, inputs)


def independent(device: str, side: int, num: int) -> Work:
    """`num` independent products on one device."""
    inputs = tuple(normal(side, side, device=device, seed=index) for index in range(num))
    return _each(lambda x: x.mm(x), inputs)


def _each(fn: Callable[[Tensor], Any], inputs: tuple[Tensor, ...]) -> Work:
    """The same for each of the inputs."""

    def everywhere(*xs: Tensor) -> list[Any]:
        return [fn(x) for x in xs]

    return Work(
        fn=everywhere, inputs=inputs, pieces=tuple(partial(fn, x) for x in inputs), join=list
    )


def branches(device: str, size: int, channels: int) -> Work:
    """An Inception block at batch 1, forward and backward: four branches that meet in a concatenation."""
    # Four branches of as many channels, which together are what came in.
    quarter = channels // 4
    x = normal(1, channels, size, size, device=device, seed=1)
    shapes = (
        (quarter, channels, 1), (quarter, channels, 1), (quarter, quarter, 3),
        (quarter, channels, 1), (quarter, quarter, 5), (quarter, channels, 1),
    )  # fmt: skip
    weights = tuple(
        (normal(out, into, k, k, device=device, seed=index) / into**0.5).requires_grad_()
        for index, (out, into, k) in enumerate(shapes)
    )

    def paths(x: Tensor, w: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        return [
            lambda: F.conv2d(x, w[0]),
            lambda: F.conv2d(F.relu(F.conv2d(x, w[1])), w[2], padding=1),
            lambda: F.conv2d(F.relu(F.conv2d(x, w[3])), w[4], padding=2),
            lambda: F.conv2d(F.max_pool2d(x, 3, stride=1, padding=1), w[5]),
        ]

    def join(outputs: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
        loss = F.relu(torch.cat(list(outputs), 1)).square().mean()
        return (loss.detach(), *torch.autograd.grad(loss, list(w)))

    def whole(x: Tensor, *w: Tensor) -> tuple[Tensor, ...]:
        return join([path() for path in paths(x, w)], w)

    return Work(
        fn=whole,
        inputs=(x, *weights),
        pieces=tuple(paths(x, weights)),
        join=lambda outputs: join(outputs, weights),
    )


def cell(device: str, size: int, channels: int) -> Work:
    """A normal cell of NASNet-A at batch 1, forward and backward: five sums of two branches each, joined.

    Source: Zoph and others 2018, figure 4; both inputs have the same size, without batch normalisation.
    """
    x, before = (normal(1, channels, size, size, device=device, seed=seed) for seed in (1, 2))
    kernels = (3, 5, 3, 5, 3)
    shapes = [
        shape for k in kernels for shape in ((channels, 1, k, k), (channels, channels, 1, 1)) * 2
    ]
    weights = tuple(
        (normal(*shape, device=device, seed=seed) / shape[1] ** 0.5).requires_grad_()
        for seed, shape in enumerate(shapes)
    )

    def separable(x: Tensor, index: int, w: Sequence[Tensor]) -> Tensor:
        """Twice ReLU, a depthwise and a pointwise convolution."""
        for depthwise, pointwise in (
            w[4 * index : 4 * index + 2],
            w[4 * index + 2 : 4 * index + 4],
        ):
            pad = depthwise.shape[-1] // 2
            x = F.conv2d(F.relu(x), depthwise, padding=pad, groups=channels)
            x = F.conv2d(x, pointwise)
        return x

    def sums(x: Tensor, y: Tensor, w: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        return [
            lambda: separable(x, 0, w) + x,
            lambda: separable(y, 1, w) + separable(x, 2, w),
            lambda: F.avg_pool2d(x, 3, 1, 1) + y,
            lambda: F.avg_pool2d(y, 3, 1, 1) + F.avg_pool2d(y, 3, 1, 1),
            lambda: separable(y, 3, w) + separable(y, 4, w),
        ]

    def join(outputs: Sequence[Tensor], w: Sequence[Tensor]) -> tuple[Tensor, ...]:
        loss = torch.cat(list(outputs), 1).square().mean()
        return (loss.detach(), *torch.autograd.grad(loss, list(w)))

    def whole(x: Tensor, y: Tensor, *w: Tensor) -> tuple[Tensor, ...]:
        return join([one() for one in sums(x, y, w)], w)

    return Work(
        fn=whole,
        inputs=(x, before, *weights),
        pieces=tuple(sums(x, before, weights)),
        join=lambda outputs: join(outputs, weights),
    )


def perceptron_step(devices: Sequence[str], batch: int, width: int) -> Work:
    """Figure 12.3.1: two layers on two devices, half a batch each; gradients are summed and shared."""
    first, second = devices
    # Equal on both devices, as data parallelism has them.
    weights = [normal(width, width, seed=index) for index in range(2)]
    # Cloned: where both devices are one, they would share their weights.
    w = tuple(weight.to(device).clone() for device in devices for weight in weights)
    x = tuple(normal(batch, width, device=d, seed=5 + i) for i, d in enumerate(devices))

    def gradients(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward of half the batch, written out."""
        hidden = torch.tanh(x @ w1)
        error = (hidden @ w2 - x) / x.shape[0]
        behind = (error @ w2.t()) * (1 - hidden.square())
        return x.t() @ behind, hidden.t() @ error

    def update(parts: Sequence[tuple[Tensor, Tensor]], w: Sequence[Tensor]) -> list[Tensor]:
        # The sum is made on the first device and goes back to the second.
        sums = [a + b.to(first) for a, b in zip(*parts, strict=True)]
        shared = [*sums, *(total.to(second) for total in sums)]
        return [weight - 0.1 * total for weight, total in zip(w, shared, strict=True)]

    def whole(x0: Tensor, x1: Tensor, *w: Tensor) -> list[Tensor]:
        return update([gradients(x0, w[0], w[1]), gradients(x1, w[2], w[3])], w)

    return Work(
        fn=whole,
        inputs=(*x, *w),
        pieces=(lambda: gradients(x[0], w[0], w[1]), lambda: gradients(x[1], w[2], w[3])),
        join=lambda parts: update(parts, w),
    )


def parallelized(work: Work) -> Way:
    """The function as it is, scheduled by Ridgeline where its inputs are."""
    return Way(NAME, "ridgeline", partial(_make, work))


def _make(work: Work) -> WayRunner:
    from ridgeline.autoparallel.parallelize import parallelize

    program = parallelize(work.fn, work.inputs)

    def remarks() -> WayRemarks:
        report = program.report
        bound = f"no schedule is shorter than {units.seconds(report.bounds.limit_s)}"
        return WayRemarks(notes=(f"chose {report.chosen}: {report.reason}", bound, *report.notes))

    return WayRunner(run=lambda: program(*work.inputs), close=program.close, remarks=remarks)
