"""Settings of the process which torch's compiler takes for granted: those that choose kernels, and others.

It compares what products may be rounded to on a GPU, deterministic algorithms and the number of threads. A
captured program keeps the kernels that it was captured with; others may round otherwise, or draw other random
numbers in their dropout, and where a user allows none the code raises. What code asks of Python's settings is
a constant to it, and `x.sin()` an operator, whatever `torch.Tensor.sin` was replaced by.
"""

import gc
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._C._dynamo.guards import dict_version

from ridgeline.programs.watches.conditions import Conditions
from ridgeline.reach.owners import is_standard

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


class MethodsOfTensors:
    """Which of the states seen so far `torch.Tensor` and `nn.Parameter` are in, counted from 0.

    Cost: 0.1 us a call while nothing is assigned to these classes.
    """

    def __init__(self) -> None:
        # The dictionaries behind the views that Python gives of them: only they have a version.
        kinds = (torch.Tensor, torch.nn.Parameter)
        self._dictionaries = tuple(gc.get_referents(vars(kind))[0] for kind in kinds)
        self._version = -1
        self._state = 0
        self._known: list[tuple[dict[str, Any], ...]] = []

    def __call__(self) -> int:
        """The number of the state; one that was there before has the number that it had."""
        # Versions only ever rise, so that their sum changes with either.
        version = sum(map(dict_version, self._dictionaries))
        if version != self._version:
            now = tuple(map(_assigned, self._dictionaries))
            if now not in self._known:
                self._known.append(now)
            self._state, self._version = self._known.index(now), version
        return self._state

    def untouched(self, conditions: Conditions) -> str:
        """The term that nothing is assigned to these classes from now on, without a call of ours."""
        version = conditions.constant(dict_version)
        return " and ".join(
            f"{version}({conditions.constant(one)}) == {dict_version(one)}"
            for one in self._dictionaries
        )


CLASS_NOTES = ("__slotnames__", "__annotations__")
"""What Python itself writes into a class: when an object is first copied, when annotations are first read."""


def _assigned(names: dict[str, Any]) -> dict[str, Any]:
    """A class's names without what Python notes in it."""
    return {name: value for name, value in names.items() if name not in CLASS_NOTES}


_methods_of_tensors = MethodsOfTensors()
_ASKED: dict[str, Ask] = {
    "getrecursionlimit": sys.getrecursionlimit,
    "get_int_max_str_digits": sys.get_int_max_str_digits,
}
"""What code may ask Python for, by the names of the functions."""


def operators_of(graph: fx.GraphModule) -> Iterator[str]:
    """Names of what a graph calls, with what is called inside of it."""
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op.startswith("call_"):
                    yield getattr(node.target, "__name__", str(node.target))


def settings_of(operators: Iterable[str], code: Iterable[types.CodeType]) -> tuple[Ask, ...]:
    """Functions that ask for what a program takes for granted of the process.

    Args:
        operators: Names of what it calls, whose kernels settings choose.
        code: Of the functions that were read.
    """
    text = " ".join(operators)
    # Python's own code (`inspect.unwrap`) bounds its loops by a limit that torch's compiler raises.
    names = {n for part in code if not is_standard(part.co_filename) for n in part.co_names}
    return (
        _methods_of_tensors,
        *(ask for choice in CHOICES if choice.operators.search(text) for ask in choice.settings),
        *(ask for name, ask in _ASKED.items() if name in names),
    )
