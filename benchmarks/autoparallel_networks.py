"""What the benchmark of automatic parallelism runs: networks with branches, and two chains by all means."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[], object]


class ConvNormReLU(nn.Module):
    """Convolution, batch normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Images in, images of the same size out."""
        return self.norm(self.conv(x)).relu()


class Inception(nn.Module):
    """Four branches side by side, joined by channels.

    Source: block 3a of GoogLeNet (Szegedy and others 2015), with batch normalisation.
    """

    def __init__(self, inputs: int = 192) -> None:
        super().__init__()
        self.one = ConvNormReLU(inputs, 64, 1)
        self.three = nn.Sequential(ConvNormReLU(inputs, 96, 1), ConvNormReLU(96, 128, 3))
        self.five = nn.Sequential(ConvNormReLU(inputs, 16, 1), ConvNormReLU(16, 32, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvNormReLU(inputs, 32, 1))

    def forward(self, x: Tensor) -> Tensor:
        """192 channels in, 256 out."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class Separable(nn.Sequential):
    """ReLU, depthwise and pointwise convolution, batch normalisation; twice."""

    def __init__(self, channels: int, kernel: int) -> None:
        layers: list[nn.Module] = []
        for _ in range(2):
            depthwise = nn.Conv2d(
                channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False
            )
            pointwise = nn.Conv2d(channels, channels, 1, bias=False)
            layers += [nn.ReLU(), depthwise, pointwise, nn.BatchNorm2d(channels)]
        super().__init__(*layers)


class NasnetCell(nn.Module):
    """Five sums of two branches, joined by channels.

    Source: the normal cell of NASNet-A (Zoph and others 2018), both inputs of the same size.
    """

    def __init__(self, channels: int = 44) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Separable(channels, kernel) for kernel in (3, 5, 3, 5, 3))

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """The results of the last cell and of the one before it."""
        a, b, c, d, e = self.branches
        pool = nn.functional.avg_pool2d
        sums = [
            a(x) + x,
            b(before) + c(x),
            pool(x, 3, 1, 1) + before,
            pool(before, 3, 1, 1) + pool(before, 3, 1, 1),
            d(before) + e(before),
        ]
        return torch.cat(sums, 1)


def training(module: Callable[..., Tensor], parameters: list[nn.Parameter]) -> Callable[..., Any]:
    """Loss and gradients."""

    def fn(*inputs: Tensor) -> tuple[Tensor, ...]:
        loss = module(*inputs).square().mean()
        return (loss.detach(), *torch.autograd.grad(loss, parameters))

    return fn


def networks() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Name to network and inputs on the GPU."""
    torch.manual_seed(0)
    images = torch.randn(2, 1, 44, 28, 28, device="cuda")
    return {
        "inception_block": (Inception().cuda(), (torch.randn(1, 192, 28, 28, device="cuda"),)),
        "nasnet_cell": (NasnetCell().cuda(), (images[0], images[1])),
    }


class TwoChains:
    """Two chains of products that do not depend on each other.

    Args:
        size: Rows and columns of each factor.
        depth: Products in a chain.
        device: Where.
    """

    def __init__(self, size: int, depth: int, device: str) -> None:
        torch.manual_seed(0)
        self.depth = depth
        self.weights = [torch.randn(size, size, device=device) / size**0.5 for _ in range(2)]
        self.args = tuple(torch.randn(size, size, device=device) for _ in range(2))

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Both chains, one after the other."""
        return _chain(x, self.weights[0], self.depth), _chain(y, self.weights[1], self.depth)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread an operator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def chains_of(target_s: float) -> TwoChains:
    """Two chains of products that take about `target_s` each with one thread."""
    size = 64
    while _product_s(size) < target_s and size < 1024:
        size += 16
    return TwoChains(size, 20, "cpu")


def _product_s(size: int) -> float:
    """Seconds of one product, the best of some: the first starts the library."""
    x = torch.randn(size, size)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        torch.mm(x, x)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _chain(x: Tensor, weight: Tensor, depth: int) -> Tensor:
    for _ in range(depth):
        x = torch.mm(x, weight)
    return x


def _forked(x: Tensor, y: Tensor, left: Tensor, right: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    future = torch.jit.fork(_chain, x, left, depth)
    second = _chain(y, right, depth)
    return torch.jit.wait(future), second


def forked(x: Tensor, y: Tensor, left: Tensor, right: Tensor, depth: int) -> Call:
    """The chains by torch.jit.fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its script compiler old
        both = torch.jit.script(_forked)
    return lambda: both(x, y, left, right, depth)
