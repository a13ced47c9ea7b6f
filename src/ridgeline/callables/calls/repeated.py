"""Calls in which one tensor stands at several places, such as `attend(x, x, x)`.

Code may ask whether two arguments are one, so a program that was captured for different tensors is not that
of such calls, and copies of the arguments must not be apart. They are captured as a callable of each tensor
once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.tensors.copies import repeats


class Repeats(NamedTuple):
    """Where the leaves of arguments come from, if each tensor is given once.

    Attributes:
        structure: Of the arguments.
        sources: For each leaf, its index among those that are given.
        firsts: For each that is given, the index of the leaf that it is first.
    """

    structure: pytree.TreeSpec
    sources: tuple[int, ...]
    firsts: tuple[int, ...]

    def distinct(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The leaves of arguments, each tensor once."""
        leaves = pytree.tree_leaves(args)
        return tuple(leaves[index] for index in self.firsts)

    def arguments(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of which these are the leaves."""
        leaves = [given[index] for index in self.sources]
        args: tuple[Any, ...] = pytree.tree_unflatten(leaves, self.structure)
        return args

    def wrapped(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The callable as one of each tensor once; a module if it is one."""
        return DistinctModule(fn, self) if isinstance(fn, nn.Module) else DistinctCall(fn, self)

    def calling(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A program of each tensor once as one of the arguments."""

        def call(*args: Any) -> Any:
            return run(*self.distinct(args))

        return call


class DistinctCall:
    """A callable that is given each of its tensors once."""

    def __init__(self, fn: Callable[..., Any], repeats: Repeats) -> None:
        self.fn = fn
        self.repeats = repeats

    def __call__(self, *given: Any) -> Any:
        """The result for the arguments of which these are the leaves."""
        return self.fn(*self.repeats.arguments(given))


class DistinctModule(nn.Module):
    """`DistinctCall` of a module, in which parameters and blocks are found as in any other."""

    def __init__(self, fn: nn.Module, repeats: Repeats) -> None:
        super().__init__()
        self.fn = fn
        self.repeats = repeats

    def forward(self, *given: Any) -> Any:
        """The result for the arguments of which these are the leaves."""
        return self.fn(*self.repeats.arguments(given))


def as_written(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The callable that takes arguments."""
    return fn.fn if isinstance(fn, DistinctCall | DistinctModule) else fn


def repeats_of(args: tuple[Any, ...]) -> Repeats | None:
    """How arguments repeat tensors; None where each is another."""
    leaves, structure = pytree.tree_flatten(args)
    # Numbers that are equal may be one object by chance.
    places = repeats([leaf if isinstance(leaf, Tensor) else object() for leaf in leaves])
    firsts = sorted(set(places))
    if len(firsts) == len(leaves):
        return None
    return Repeats(structure, tuple(map(firsts.index, places)), tuple(firsts))


def map_each(change: Callable[[Tensor], Tensor], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with changed tensors, in which what was one tensor still is."""
    repeats = repeats_of(args)
    if repeats is None:
        changed: tuple[Any, ...] = pytree.tree_map_only(Tensor, change, args)
        return changed
    return repeats.arguments(pytree.tree_map_only(Tensor, change, repeats.distinct(args)))
