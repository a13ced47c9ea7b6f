"""Where a NaN or an infinity came from: one forward and backward, operator by operator.

The operators are watched below autograd, with the module whose forward or backward issued them. Fills
with infinity and operators with an infinite number are left out, because attention masks are made of them;
an operator that makes a NaN of such a mask is still found, since a NaN is looked for among inputs that have
none.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from ridgeline.units import digits3

_FILLS = (
    "empty", "fill", "full", "full_like", "index_fill", "masked_fill", "new_empty", "new_full",
    "scalar_tensor", "where", "set_", "constant_pad_nd", "resize_",
)  # fmt: skip


class _FoundError(Exception):
    """Ends the watched step at the first finding; never leaves this file."""


def find_non_finite(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any
) -> str | None:
    """A description of what first becomes NaN or infinite in a step; None when everything stays finite.

    Looks at the batch first, then at parameters and buffers, then runs forward and backward and stops
    at the first operator whose output is not finite although its inputs are.

    Args:
        model: Must have no hooks that communicate; its gradients are changed.
        loss_fn: As of the task.
        batch: On the model's device.

    Cost: Many times a plain step: every input and output is reduced and read.
    """
    for path, leaf in pytree.tree_leaves_with_path(batch):
        if isinstance(leaf, Tensor) and not _is_finite(leaf):
            return f"the batch itself: tensor {pytree.keystr(path) or 'batch'} {_describe(leaf)}"
    # Buffers may hold infinities on purpose, as masks do; a parameter with one is lost.
    named = _first_bad(model.named_parameters(), "parameter") or _first_bad(
        ((n, b) for n, b in model.named_buffers() if bool(torch.isnan(b).any())), "buffer"
    )
    if named is not None:
        return named
    tracker = ModuleTracker()
    watch = _Watch(tracker)
    try:
        with tracker, watch:
            watch.phase = "forward"
            loss = loss_fn(model, batch)
            watch.phase = "backward"
            if loss.requires_grad:
                loss.backward()
    except _FoundError as found:
        return str(found)
    finally:
        for parameter in model.parameters():  # a network may have a `zero_grad` of its own
            parameter.grad = None
    return None


def largest_magnitude(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude among the values of tensors, NaN where one is; 0.0 where they have none.

    Integers and floats of one byte, as quantised weights are, count as finite.

    Cost: One reduction of each; waits for the device.
    """
    watched = [tensor.detach() for tensor in tensors if _is_watched(tensor)]
    return float(nn.utils.get_total_norm(watched, math.inf)) if watched else 0.0


class _Watch(TorchDispatchMode):
    """Raises `_FoundError` at the first operator that makes a value non-finite."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.phase = "forward"
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if _is_watched(leaf)]
        had_nan = any(bool(torch.isnan(t).any()) for t in inputs)
        # Masks are made by infinite numbers, too: `ones * -inf`, `scatter(1, index, -inf)`.
        had_inf = any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)
        had_inf = had_inf or any(bool(torch.isinf(t).any()) for t in inputs)
        # Before the operator runs: one that works in place overwrites its inputs.
        ranges = [_describe(t) for t in inputs] if not had_nan else []
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001 - no public accessor
        if any(name == fill or name == f"{fill}_" or name.startswith("empty") for fill in _FILLS):
            return out
        for result in pytree.tree_leaves(out):
            if not _is_watched(result):
                continue
            makes_nan = not had_nan and bool(torch.isnan(result).any())
            # Infinity from infinity is no news (a mask that is added); a NaN from it is.
            makes_inf = not (had_nan or had_inf) and bool(torch.isinf(result).any())
            if makes_nan or makes_inf:
                raise _FoundError(self._finding(name, "NaN" if makes_nan else "inf", ranges))
        return out

    def _finding(self, name: str, what: str, ranges: list[str]) -> str:
        # All modules on the way to this one are listed; the deepest issued the operator.
        path = max(self._tracker.parents - {"Global"}, key=lambda p: p.count("."), default="")
        _, _, inner = path.partition(".")  # the first part is the class of the outermost module
        where = f"module `{inner}`" if inner else "the loss or the outermost module"
        inputs = "; ".join(ranges) or "none"
        return f"operator {name} in {where} ({self.phase}) makes {what}; inputs: {inputs}"


def _is_watched(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.layout == torch.strided
        and value.numel() > 0
        and value.element_size() > 1  # torch neither compares nor reduces floats of 8 and 4 bits
    )


def _is_finite(value: Tensor) -> bool:
    return not _is_watched(value) or bool(torch.isfinite(value).all())


def _first_bad(tensors: Iterable[tuple[str, Tensor]], kind: str) -> str | None:
    bad = [(name, tensor) for name, tensor in tensors if not _is_finite(tensor.detach())]
    if not bad:
        return None
    others = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"{kind} {bad[0][0]} is already not finite: {_describe(bad[0][1])}{others}"


def _describe(value: Tensor) -> str:
    """Dtype, shape, range of the finite values, and how many are not."""
    shape = ", ".join(str(size) for size in value.shape)
    text = f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    flat = value.detach().abs() if value.is_complex() else value.detach()
    finite = flat[torch.isfinite(flat)].double()
    if finite.numel():
        text += f" in [{_number(finite.min())}, {_number(finite.max())}]"
    wrong = value.numel() - finite.numel()
    return f"{text} with {wrong} of {value.numel()} values not finite" if wrong else text


def _number(value: Tensor) -> str:
    number = float(value)
    return f"{number:.3g}" if number and not 1e-3 <= abs(number) < 1e6 else digits3(number)
