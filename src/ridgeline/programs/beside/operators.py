"""Operators that run on a second stream beside the current one, for graphs that torch's compiler writes.

The compiler issues everything on one stream. These operators start a weight gradient on a side stream,
after all that was issued so far, and return at once; `join` makes the current stream wait for the side
stream. Under capture both become edges of the CUDA graph. On a CPU they compute in place.

What a side stream reads must not be freed before it is done, and the compiler knows nothing of streams.
So the operators hold on to their arguments until `join` lets go, including copies that the compiler makes for
them; and `join` takes the originals as arguments, so that nothing is written over them before. The compiler
itself must not put anything into memory that it takes for dead: `REQUIRED` says so. Nor may it read a result
before `join`, which it does to bring one into the layout that the graph promised: results are made in it.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.capture import ready

REQUIRED = {"allow_buffer_reuse": False}
"""Options of the compiler for graphs with these operators: memory is then reused by torch's allocator alone,
which knows who holds it."""

STAYS = -1
"""The number of no program: a result that does not leave is neither placed nor noted."""

_LIBRARY = torch.library.Library("ridgeline", "DEF")
# Else the compiler copies arguments into the layouts of the trace, also where the kernel takes any.
_ANY_LAYOUT = (torch.Tag.flexible_layout,)
_LIBRARY.define(
    "conv_weight_gradient(Tensor gradient, Tensor input, Tensor weight, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, SymInt[] strides,"
    " int program) -> Tensor",
    tags=_ANY_LAYOUT,
)
_LIBRARY.define("product(Tensor left, Tensor right, int program) -> Tensor", tags=_ANY_LAYOUT)
_LIBRARY.define(
    "hand_out(Tensor[] sources, ScalarType dtype, int program, bool is_beside) -> Tensor[]",
    tags=_ANY_LAYOUT,
)
# Declared as writes, which they are not: the compiler must neither drop these calls nor read results before
# them.
_LIBRARY.define("announce(Tensor(a!) result) -> ()", tags=_ANY_LAYOUT)
_LIBRARY.define("join(Tensor(a!)[] results, Tensor[] kept) -> ()", tags=_ANY_LAYOUT)


class _Side:
    """The stream beside a stream, and what it reads since the last join."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.read: list[Tensor] = []


@functools.cache
def _side_of(device: torch.device, _stream: int) -> _Side:
    return _Side(device)


def _beside(device: torch.device) -> _Side:
    return _side_of(device, torch.cuda.current_stream(device).cuda_stream)


@contextlib.contextmanager
def _on_the_side(*read: Tensor) -> Iterator[None]:
    """Run on the side stream, after all that was issued so far, and hold on to what is read there."""
    device = read[0].device
    side = _beside(device)
    side.read.extend(read)
    # In each call: the inputs of this operator may have been issued after the one before went to the side.
    side.stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side.stream):
        yield


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
    strides: Sequence[int],
    program: int,
) -> Tensor:
    result: Tensor = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, dilation, transposed, output_padding, groups,
        [False, True, False],
    )[1]  # fmt: skip
    is_same = all(
        size == 1 or old == new
        for size, old, new in zip(result.shape, result.stride(), strides, strict=True)
    )
    if is_same:
        result = result.as_strided(result.shape, strides)
    else:
        result = ready.place(program, result.shape, strides, result, result.dtype).copy_(result)
    if program != STAYS:
        ready.note(result, program)
    return result


def _conv_weight_gradient_meta(
    gradient: Tensor, x: Tensor, weight: Tensor, *settings: Any
) -> Tensor:
    *_, strides, _program = settings
    return weight.new_empty_strided(weight.shape, strides)


def _conv_weight_gradient_beside(
    gradient: Tensor, x: Tensor, weight: Tensor, *settings: Any
) -> Tensor:
    with _on_the_side(gradient, x, weight):
        return _conv_weight_gradient(gradient, x, weight, *settings)


def _product(left: Tensor, right: Tensor, program: int) -> Tensor:
    shape = (left.shape[0], right.shape[1])
    result = ready.place(program, shape, (shape[1], 1), left, left.dtype)
    torch.mm(left, right, out=result)
    if program != STAYS:
        ready.note(result, program)
    return result


def _product_meta(left: Tensor, right: Tensor, program: int) -> Tensor:
    return torch.mm(left, right)


def _product_beside(left: Tensor, right: Tensor, program: int) -> Tensor:
    with _on_the_side(left, right):
        return _product(left, right, program)


def _hand_out(
    sources: Sequence[Tensor], dtype: torch.dtype, program: int, is_beside: bool
) -> list[Tensor]:
    results = [
        ready.place(program, source.shape, source.stride(), source, dtype, ahead)
        for ahead, source in enumerate(sources)
    ]
    if len(sources) == 1:
        results[0].copy_(sources[0])
    else:  # in one launch: each would take several times as long as its bytes do
        torch._foreach_copy_(results, list(sources))
    for result in results:
        ready.note(result, program)
    return results


def _hand_out_meta(
    sources: Sequence[Tensor], dtype: torch.dtype, program: int, is_beside: bool
) -> list[Tensor]:
    return [
        source.new_empty_strided(source.shape, source.stride(), dtype=dtype) for source in sources
    ]


def _hand_out_on_gpu(
    sources: Sequence[Tensor], dtype: torch.dtype, program: int, is_beside: bool
) -> list[Tensor]:
    with _on_the_side(*sources) if is_beside else contextlib.nullcontext():
        return _hand_out(sources, dtype, program, is_beside)


def _join(results: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """On a CPU there is nothing to wait for."""


def _join_streams(results: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    device = results[0].device
    side = _beside(device)
    torch.cuda.current_stream(device).wait_stream(side.stream)
    side.read.clear()


def _announce_meta(result: Tensor) -> None:
    """A result without data is never ready."""


for _key, _conv, _mm, _hand, _wait in (
    ("CUDA", _conv_weight_gradient_beside, _product_beside, _hand_out_on_gpu, _join_streams),
    ("CPU", _conv_weight_gradient, _product, _hand_out, _join),
    ("Meta", _conv_weight_gradient_meta, _product_meta, _hand_out_meta, _join),
):
    _LIBRARY.impl("conv_weight_gradient", _conv, _key)
    _LIBRARY.impl("product", _mm, _key)
    _LIBRARY.impl("hand_out", _hand, _key)
    _LIBRARY.impl("join", _wait, _key)
    _LIBRARY.impl("announce", _announce_meta if _key == "Meta" else ready.note, _key)

CONV_WEIGHT_GRADIENT = torch.ops.ridgeline.conv_weight_gradient.default
"""The gradient of a convolution's weight, in memory of the given strides: the arguments of
`aten.convolution_backward` without bias sizes and mask, then strides, program (see `ready.note`)."""
PRODUCT = torch.ops.ridgeline.product.default
"""`left @ right`, both matrices; then program."""
HAND_OUT = torch.ops.ridgeline.hand_out.default
"""Results that leave, converted to a dtype, where their receiver wants them; then program and whether the
side stream does it. Layouts stay."""
JOIN = torch.ops.ridgeline.join.default
"""From here on, `results` may be read and `kept` may be freed."""
ANNOUNCE = torch.ops.ridgeline.announce.default
"""Here `result` is ready, on the current stream; see `ready`."""
