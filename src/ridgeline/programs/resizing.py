"""Gradients of `interpolate` in compiled programs: matrix products on a GPU, the eager kernel elsewhere.

The compiler (torch 2.13) writes linear and cubic interpolation as reads of neighbouring elements, which it
fuses with what is around, and its gradient as additions to each of them, one by one. Source: SegFormer in
bfloat16, 16 images of 512 x 512, on an H100: these took 14.4 of the 30.8 ms of a step.

Such an interpolation multiplies by a matrix along each dimension of the image, and its gradient by their
transposes. These read the gradient once, and add in float32 and in a fixed order, where the eager kernel on a
GPU adds in the type of the gradient and in no order.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

_BACKWARD = {
    "linear": torch.ops.aten.upsample_linear1d_backward.default,
    "bilinear": torch.ops.aten.upsample_bilinear2d_backward.default,
    "bicubic": torch.ops.aten.upsample_bicubic2d_backward.default,
    "trilinear": torch.ops.aten.upsample_trilinear3d_backward.default,
}
CACHEABLE = {f"{__name__}.interpolated": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
"""What the compiler may keep programs with in its cache, and its version; those of another are not taken."""
_NAMES = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")


def use_own_gradients(graph: fx.GraphModule) -> None:
    """Change a graph that TorchDynamo made so that the compiler does not write gradients of `interpolate`."""
    changed = [
        node
        for node in graph.graph.find_nodes(op="call_function", target=functional.interpolate)
        if _is_written_out(node)
    ]
    for node in changed:
        node.target = interpolated
    if changed:
        graph.recompile()


def _is_written_out(node: fx.Node) -> bool:
    given = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    return given.get("mode") in _BACKWARD and not given.get("antialias")


def interpolated(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """`interpolate`, whose arguments these are."""
    if recompute_scale_factor or not scale_factor:
        scales: list[Any] = [None] * (input.ndim - 2)
    elif isinstance(scale_factor, (list, tuple)):
        scales = [*scale_factor]
    else:
        scales = [scale_factor] * (input.ndim - 2)
    options = (size, scale_factor, mode, align_corners, recompute_scale_factor)
    result = _Interpolated.apply(input, options, scales)
    assert isinstance(result, Tensor)
    return result


class _Interpolated(torch.autograd.Function):
    """Forward as the compiler likes it, backward as products or one operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        input: Tensor, options: tuple[Any, ...], _: list[Any]
    ) -> Tensor:
        return functional.interpolate(input, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, ctx.options, ctx.scales = inputs
        ctx.shapes = list(output.shape[2:]), list(input.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        mode, is_aligned = ctx.options[2], bool(ctx.options[3])
        if _takes_products(gradient):
            return _by_products(gradient, ctx.shapes[1], mode, is_aligned, ctx.scales), None, None
        return _BACKWARD[mode](gradient, *ctx.shapes, is_aligned, *ctx.scales), None, None


def _takes_products(gradient: Tensor) -> bool:
    return gradient.is_cuda


def _by_products(
    gradient: Tensor, shape: list[int], mode: str, is_aligned: bool, scales: list[Any]
) -> Tensor:
    """The gradient of the input, of `shape`, along one dimension after the other."""
    # Channels that lie innermost stay there: a product along the image is then one along rows, without a
    # copy.
    is_last = gradient.stride(1) == 1 and not gradient.is_contiguous()  # channels
    # Backward may run under the caller's autocast, which would round the products once more.
    with torch.autocast(gradient.device.type, enabled=False):
        result = gradient.movedim(1, -1) if is_last else gradient
        for number, scale in enumerate(scales):
            place = number + (1 if is_last else 2)
            matrix = _matrix(shape[number + 2], gradient, number + 2, mode, is_aligned, scale)
            result = _along(result, place, matrix)
    return result.movedim(-1, 1) if is_last else result


def _along(value: Tensor, place: int, matrix: Tensor) -> Tensor:
    """The product with a matrix along one dimension."""
    if place == value.ndim - 1:
        return value @ matrix.T
    rest = value.shape[place + 1 :]
    return (matrix @ value.flatten(place + 1)).unflatten(-1, rest)


def _matrix(
    size: int, gradient: Tensor, dimension: int, mode: str, is_aligned: bool, scale: Any
) -> Tensor:
    """What an element of the result takes of those of the input, in one dimension: (input, result)."""
    resized = gradient.shape[dimension]
    exact = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    # From the forward kernel itself, so that weights at borders and of each option are exactly its own.
    unit = torch.eye(size, device=gradient.device, dtype=exact)
    if mode == "bicubic":  # of which there is none in one dimension
        image = unit[None, :, None]
        found = torch.ops.aten.upsample_bicubic2d(image, [1, resized], is_aligned, None, scale)
    else:
        found = torch.ops.aten.upsample_linear1d(unit[None], [resized], is_aligned, scale)
    return found.reshape(size, resized).to(gradient.dtype)
