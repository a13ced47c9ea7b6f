"""Whether a call is like the one that was traced: same shapes, same settings, same Python values."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.runtime.autoparallel.program import Program
from ridgeline.runtime.casts import casting
from ridgeline.runtime.hybrid.calls.state import CallState

Refusal = Literal["other_shapes", "changed", "gradients"]
"""Why a call runs as the function was written: other inputs; parameters that were replaced, or Python values
that the code reads and that are no longer the same; or results that need gradients (or gradients that are
there already where the function makes new ones)."""


class Guard:
    """Tells calls that a traced program can serve from those that the function itself has to.

    Args:
        fn: The function as written.
        program: What was traced from it just now.
        args: The example arguments.
        serves_gradients: Results can be differentiated.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        program: Program,
        args: tuple[Any, ...],
        *,
        serves_gradients: bool = False,
    ) -> None:
        leaves, self._structure = pytree.tree_flatten(args)
        self._specs = [_spec(leaf) for leaf in leaves]
        self._is_flat = self._structure == pytree.tree_structure(tuple(leaves))
        self._is_unchanged = CallState(fn).watch()
        self._settings = _settings()
        self._grads = [program.state[name] for name in program.grads]
        self._written = program.written_storages()
        self._refuses_gradients = program.is_differentiable and not serves_gradients
        self._state = tuple(program.state.values())
        self._needed = [tensor.requires_grad for tensor in self._state]

    def refusal(self, args: tuple[Any, ...]) -> Refusal | None:
        """Why these arguments cannot be served, or None where they can.

        Cost: About 1 us a tensor of the arguments and 0.2 us a tensor of the state.
        """
        if self._is_flat:
            leaves: Any = args
        else:
            leaves, structure = pytree.tree_flatten(args)
            if structure != self._structure:
                return "other_shapes"
        if len(leaves) != len(self._specs) or [_spec(leaf) for leaf in leaves] != self._specs:
            return "other_shapes"
        if not self._is_unchanged() or _settings() != self._settings:
            return "changed"
        if self._refuses_gradients and torch.is_grad_enabled():
            return "gradients"
        if [tensor.requires_grad for tensor in self._state] != self._needed:
            return "changed"
        if any(tensor.grad is not None for tensor in self._grads):
            return "gradients"
        # An input that is also state, which is written: the program knows them as two variables.
        if self._written and any(
            leaf.untyped_storage().data_ptr() in self._written for leaf in leaves
        ):
            return "other_shapes"
        return None


def _spec(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


def _settings() -> tuple[Any, ...]:
    """What decides which operators run, besides the function."""
    return (
        *casting(),
        torch.are_deterministic_algorithms_enabled(),
    )
