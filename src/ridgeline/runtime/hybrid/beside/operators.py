"""Operators that run on a second stream beside the current one, for graphs that torch's compiler writes.

The compiler issues everything on one stream. These operators start a weight gradient on a side stream,
after all that was issued so far, and return at once; `join` makes the current stream wait for the side
stream. Under capture both become edges of the CUDA graph. On a CPU they compute in place.

What a side stream reads must not be freed before it is done, and the compiler knows nothing of streams.
So `join` takes everything that was read as arguments, which keeps it alive until then.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ridgeline", "DEF")
_LIBRARY.define(
    "conv_weight_gradient(Tensor gradient, Tensor input, Tensor weight, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"
)
_LIBRARY.define("product(Tensor left, Tensor right) -> Tensor")
_LIBRARY.define("join(Tensor(a!)[] results, Tensor[] kept) -> ()")


@functools.cache
def _side_stream(device: torch.device, _stream: int) -> torch.cuda.Stream:
    """The stream beside a stream; made once."""
    return torch.cuda.Stream(device)


def _beside(device: torch.device) -> torch.cuda.Stream:
    return _side_stream(device, torch.cuda.current_stream(device).cuda_stream)


def _conv_weight_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    result: Tensor = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, dilation, transposed, output_padding, groups,
        [False, True, False],
    )[1]  # fmt: skip
    return result


def _conv_weight_gradient_beside(gradient: Tensor, *args: object) -> Tensor:
    side = _beside(gradient.device)
    side.wait_stream(torch.cuda.current_stream(gradient.device))
    with torch.cuda.stream(side):
        return _conv_weight_gradient(gradient, *args)  # type: ignore[arg-type]


def _product_beside(left: Tensor, right: Tensor) -> Tensor:
    side = _beside(left.device)
    side.wait_stream(torch.cuda.current_stream(left.device))
    with torch.cuda.stream(side):
        return torch.mm(left, right)


def _join(results: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """On a CPU there is nothing to wait for."""


def _join_streams(results: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    device = results[0].device
    torch.cuda.current_stream(device).wait_stream(_beside(device))


for _key, _conv, _mm, _wait in (
    ("CUDA", _conv_weight_gradient_beside, _product_beside, _join_streams),
    ("CPU", _conv_weight_gradient, torch.mm, _join),
    ("Meta", _conv_weight_gradient, torch.mm, _join),
):
    _LIBRARY.impl("conv_weight_gradient", _conv, _key)
    _LIBRARY.impl("product", _mm, _key)
    _LIBRARY.impl("join", _wait, _key)

CONV_WEIGHT_GRADIENT = torch.ops.ridgeline.conv_weight_gradient.default
"""The gradient of a convolution's weight: the arguments of `aten.convolution_backward` without bias sizes
and mask."""
PRODUCT = torch.ops.ridgeline.product.default
"""`left @ right`, both matrices."""
JOIN = torch.ops.ridgeline.join.default
"""From here on, `results` may be read and `kept` may be freed."""
