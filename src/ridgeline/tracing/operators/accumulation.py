"""Whether autograd adds two gradients in place, as it does in real eager execution.

Where a tensor is used twice, the engine adds up its gradients. If nothing else holds the first of them
it adds in place and allocates nothing; but it never does so while a dispatch mode is active, and a
trace has one. So the engine's own rule is applied here, and the recorder issues what it would issue.

Source: `can_accumulate_inplace` and `accumulate` in pytorch/torch/csrc/autograd/input_buffer.cpp.
"""
# ruff: noqa: SLF001 - reference counts and frames, which are kept under underscores

import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

References = tuple[int, int]
"""Holders of a tensor and of its storage, as counted inside a dispatch mode."""


def references(tensor: Tensor) -> References:
    """How many hold this tensor and how many its storage, the caller included."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    # pyrefly: ignore[missing-attribute] - torch's stubs leave this method out
    return tensor._use_count(), storage


def lone_references(mode: AbstractContextManager[Any], device: torch.device) -> References:
    """The counts of a gradient that only the engine holds, found by making one.

    What is counted beside the engine (the call's own arguments, wrappers) differs between releases of
    torch, so it is measured and not assumed.

    `mode` is what a step runs in, see `Subject`; backward has a thread of its own for each GPU.
    """
    probe = _Probe()
    with mode, torch.enable_grad(), probe:
        # Used twice, so that the engine has two gradients to add up.
        value = torch.empty(2, device=device, requires_grad=True)
        (value.sin() * value.cos()).sum().backward()
    return probe.counts


def may_add_in_place(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], alone: References
) -> bool:
    """Whether this call is an addition whose first operand may take the sum; see `lone_references`."""
    if func is not aten.add.Tensor or kwargs or len(args) != 2 or torch.is_grad_enabled():
        return False
    first, second = args
    return (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and first.layout is torch.strided
        and second.layout is torch.strided
        and first.shape == second.shape
        and first.dtype == second.dtype
        and aten.is_non_overlapping_and_dense(first)
        and references(first) == alone
    )


def runs_python_backward() -> bool:
    """Whether the backward of a user's `autograd.Function` is running, innermost.

    The engine adds up what such a function returned while the function is still its current node, and torch
    2.11 counts no holder more while it runs: only the call stack distinguishes a user's sum from the
    engine's.
    """
    # From inside outwards: whichever of the two comes first is the one that runs.
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        if frame.f_code is _engine_run_backward.__code__:
            return False
        frame = frame.f_back
    return False


class _Probe(TorchDispatchMode):
    """Counts the references to the first operand of the engine's addition."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: References = (0, 0)
        self._seen: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.add.Tensor:
            self.counts = references(args[0])
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):  # the recorder looks at every storage, too
            self._seen.append(weakref.ref(result.untyped_storage()))
        return result
