"""What distinguishes one training step from another, without tracing: for the next start to recognise it."""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ridgeline.runtime.steps.body.tf32 import tf32_settings


def step_identity(model: nn.Module, loss_fn: Any, optimizer: Optimizer, batch: Any) -> list[str]:
    """Texts that are equal for steps that must take equal time: modules, shapes, code, settings.

    Values of tensors are not read. What is not seen (a flag in a configuration object, say) makes two steps
    look alike that are not; so equal texts are a reason to try what served before, never to trust it.
    """
    leaves, structure = pytree.tree_flatten(batch)
    return [
        *(_module(name, module) for name, module in model.named_modules()),
        *(_tensor(name, parameter) for name, parameter in model.named_parameters()),
        *_code(loss_fn),
        type(optimizer).__qualname__,
        *(str(_settings(group)) for group in optimizer.param_groups),
        str(structure),
        *(_tensor("", x) if isinstance(x, Tensor) else type(x).__name__ for x in leaves),
        str(torch.get_default_dtype()),
        str(tf32_settings()[0]),
        str(torch.backends.cudnn.benchmark),
    ]


def _module(name: str, module: nn.Module) -> str:
    forward = inspect.getattr_static(
        type(module), "forward", None
    )  # scripted ones have none to read
    code = "".join(_code(forward))
    return f"{name}: {type(module).__qualname__}({module.extra_repr()}) {module.training} {code}"


def _tensor(name: str, tensor: Tensor) -> str:
    # That of a sparse batch is another in each batch; nested ones have none as a whole, lazy ones none yet.
    has_shape = tensor.layout is torch.strided and not tensor.is_nested and not is_lazy(tensor)
    shape = tuple(tensor.shape) if has_shape else "?"
    return f"{name}: {shape} {tensor.dtype} {tensor.device.type} {tensor.requires_grad}"


def _settings(group: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings that change what an optimizer does, not by how much."""
    return sorted(
        (key, str(value))
        for key, value in group.items()
        # Floats say how far a step goes, and not how long it takes.
        if key not in ("params", "lr", "initial_lr") and isinstance(value, bool | int | None)
    )


def _code(fn: Any) -> Iterator[str]:
    """The bytecode of a function and of the functions written inside of it."""
    call = fn if hasattr(fn, "__code__") else type(fn).__call__
    code = getattr(call, "__code__", None)
    if not isinstance(code, types.CodeType):
        yield type(fn).__qualname__
        return
    yield code.co_code.hex()
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield value.co_code.hex()
