"""Settings of the process that choose between kernels, which torch's compiler takes for granted.

It compares what products may be rounded to on a GPU, deterministic algorithms and the number of threads. A
captured program keeps the kernels that it was captured with; others may round otherwise, or draw other random
numbers in their dropout, and where a user allows none the code raises.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

Ask = Callable[[], Any]


class KernelChoice(NamedTuple):
    """Operators, by what their names contain, and the settings that choose their kernels."""

    operators: re.Pattern[str]
    settings: tuple[Ask, ...]


def _asking(*names: str) -> tuple[Ask, ...]:
    """The functions of these names; what a version of torch does not have is left out."""
    return tuple(getattr(torch._C, name) for name in names if hasattr(torch._C, name))  # noqa: SLF001


def _precisions(kind: str) -> tuple[Ask, ...]:
    """In which type kernels of both libraries compute 32-bit numbers."""
    asked: list[Any] = [*_asking("_get_fp32_precision_getter")]
    return tuple(partial(ask, library, kind) for ask in asked for library in ("cuda", "mkldnn"))


CHOICES = (
    # `torch.autocast("cpu")` asks for the type as it is entered.
    KernelChoice(
        re.compile("autocast"),
        (partial(torch.get_autocast_dtype, "cpu"), partial(torch.get_autocast_dtype, "cuda")),
    ),
    KernelChoice(
        re.compile("attention|transformer"),
        _asking(
            *("_get_math_sdp_enabled", "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled"),
            *("_get_cudnn_sdp_enabled", "_get_overrideable_sdp_enabled", "_get_sdp_priority_order"),
            "_get_math_sdp_allow_fp16_bf16_reduction",
        ),
    ),
    KernelChoice(
        re.compile("conv"),
        (*_asking("_get_cudnn_enabled", "_get_cudnn_allow_tf32"), *_precisions("conv")),
    ),
    KernelChoice(
        re.compile("lstm|gru|rnn"),
        (*_asking("_get_cudnn_enabled", "_get_cudnn_allow_tf32"), *_precisions("rnn")),
    ),
    KernelChoice(
        re.compile("linear|mm|matmul|mv|dot|einsum|attention|conv|lstm|gru|rnn"),
        (*_asking("_get_cublas_allow_fp16_accumulation"), *_precisions("matmul")),
    ),
)


def operators_of(graph: fx.GraphModule) -> Iterator[str]:
    """Names of what a graph calls, with what is called inside of it."""
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op.startswith("call_"):
                    yield getattr(node.target, "__name__", str(node.target))


def settings_of(operators: Iterable[str]) -> tuple[Ask, ...]:
    """Functions that ask for the settings that choose the kernels of operators of these names."""
    text = " ".join(operators)
    return tuple(
        ask for choice in CHOICES if choice.operators.search(text) for ask in choice.settings
    )
