"""Callables that take and give tensors alone, as TorchScript can hold them.

A trace forgets what a named tuple or an ordered dictionary was, and takes no text, number or None.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.tensors.nests import builder, tensors_in


class FlatModule(nn.Module):
    """A module of the tensors of another's arguments and result; its parameters are found in it."""

    def __init__(self, fn: nn.Module, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.fn = fn
        self._fill = _filling(args)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the result, in order."""
        return tuple(tensors_in(self.fn(*self._fill(tensors))))


def flat(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """A callable of the tensors of its arguments, whose rest is as in `args`, that gives those of its result.

    It is a module if `fn` is one.
    """
    if isinstance(fn, nn.Module):
        return FlatModule(fn, args)
    fill = _filling(args)

    # A function, since a trace asks for its name.
    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_in(fn(*fill(tensors))))

    return call


def _filling(nest: Any) -> Callable[[tuple[Tensor, ...]], Any]:
    """A function that makes the nest anew, with its constants and other tensors."""
    leaves, structure = pytree.tree_flatten(nest)
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    build = builder(structure)

    def fill(tensors: tuple[Tensor, ...]) -> Any:
        remaining = iter(tensors)
        pairs = zip(constants, is_tensor, strict=True)
        return build([next(remaining) if is_one else constant for constant, is_one in pairs])

    return fill


def is_flat(nest: Any) -> bool:
    """Whether a result is a tensor, or a tuple of tensors; so may arguments be."""
    leaves, structure = pytree.tree_flatten(nest)
    has_tensors_only = all(isinstance(leaf, Tensor) for leaf in leaves)
    return has_tensors_only and structure in (
        pytree.tree_structure(0),
        pytree.tree_structure(tuple(leaves)),
    )


def rebuilt(call: Callable[..., Any], result: Any) -> Callable[..., Any]:
    """A call of `flat` that takes arguments, and gives what `result` is, with its own tensors."""
    fill = _filling(result)

    def run(*args: Any) -> Any:
        return fill(call(*tensors_in(args)))

    return run
