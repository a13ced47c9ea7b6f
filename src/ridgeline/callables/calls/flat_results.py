"""Callables that give the tensors of their results alone, as TorchScript can hold them.

A trace forgets what a named tuple or an ordered dictionary was, and takes no text or number among results.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.tensors.nests import builder, tensors_in


class FlatModule(nn.Module):
    """A module that gives a tuple of the tensors of another's result; its parameters are found in it."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        """The tensors, in order."""
        return tuple(tensors_in(self.fn(*args)))


def flat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that gives a tuple of the tensors of the result; a module if it is one."""
    if isinstance(fn, nn.Module):
        return FlatModule(fn)

    # A function, since a trace asks for its name.
    def call(*args: Any) -> tuple[Tensor, ...]:
        return tuple(tensors_in(fn(*args)))

    return call


def is_flat(result: Any) -> bool:
    """Whether a result is a tensor, or a tuple of tensors."""
    leaves, structure = pytree.tree_flatten(result)
    has_tensors_only = all(isinstance(leaf, Tensor) for leaf in leaves)
    return has_tensors_only and structure in (
        pytree.tree_structure(0),
        pytree.tree_structure(tuple(leaves)),
    )


def rebuilt(call: Callable[..., Any], result: Any) -> Callable[..., Any]:
    """A call of `flat` that gives what `result` is, with its own tensors and the constants of `result`."""
    leaves, structure = pytree.tree_flatten(result)
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    build = builder(structure)

    def run(*args: Any) -> Any:
        tensors = iter(call(*args))
        pairs = zip(constants, is_tensor, strict=True)
        return build([next(tensors) if is_one else constant for constant, is_one in pairs])

    return run
