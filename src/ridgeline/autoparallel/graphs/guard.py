"""Whether a call is like the one that was traced: same shapes, same settings, same Python values."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.autoparallel.graphs.program import Program
from ridgeline.capture.casts import casting
from ridgeline.capture.flat_program import name_of
from ridgeline.guards.guards import Guards
from ridgeline.guards.reading import UnreadableError, Write
from ridgeline.guards.settled import WritingError, settled_guards

Refusal = Literal["other_shapes", "changed", "gradients"]
"""Why a call runs as the function was written: other inputs; parameters that were replaced, or Python values
that the code reads and that are no longer the same; or results that need gradients (or gradients that are
there already where the function makes new ones)."""


def read_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The program whose guards are compared.

    Of its result only constants, which the traced program has: what was differentiated inside is no result
    that the compiler reads.
    """
    constants = [leaf for leaf in pytree.tree_leaves(fn(*args)) if not isinstance(leaf, Tensor)]
    return torch.zeros((), device="cpu"), constants


def read_function(fn: Callable[..., Any], args: tuple[Any, ...]) -> Guards:
    """What a function reads and takes for granted, in the modes of now.

    Raises as `settled_guards`: torch's compiler cannot read it in one piece, or it changes something in
    Python.
    """
    return settled_guards(read_call, fn, args, name_of(fn), allows=_is_gradient)


class Guard:
    """Distinguishes calls that a traced program can serve from those that the function itself has to."""

    def __init__(
        self,
        fn: Callable[..., Any],
        guards: Guards,
        program: Program,
        args: tuple[Any, ...],
        *,
        serves_gradients: bool = False,
    ) -> None:
        leaves, self._structure = pytree.tree_flatten(args)
        self._specs = [_spec(leaf) for leaf in leaves]
        # Plain arguments are their own leaves: to flatten them in every call would only take time.
        self._is_flat = self._structure == pytree.tree_structure(tuple(leaves))
        self._fn = fn
        # By modes, since code may ask for them; kept, since to read a function takes torch's compiler long.
        self._guards: dict[tuple[bool, bool], Guards | None] = {_modes(): guards}
        self._first = guards
        self._settings = _settings()
        self._grads = [program.state[name] for name in program.grads]
        self._written = program.written_storages()
        self._refuses_gradients = program.is_differentiable and not serves_gradients
        self._state = tuple(program.state.values())
        self._needed = [tensor.requires_grad for tensor in self._state]

    def refusal(self, args: tuple[Any, ...]) -> Refusal | None:
        """Why these arguments cannot be served, or None where they can.

        Cost: About 1 us a tensor of the arguments, 0.3 us a tensor of the state, and what `Guards` says. The
            first call with other modes (gradients, inference) reads the function again.
        """
        if self._is_flat:
            leaves: Any = args
        else:
            leaves, structure = pytree.tree_flatten(args)
            if structure != self._structure:
                return "other_shapes"
        if len(leaves) != len(self._specs) or [_spec(leaf) for leaf in leaves] != self._specs:
            return "other_shapes"
        if self._refuses_gradients and torch.is_grad_enabled():
            return "gradients"
        if [tensor.requires_grad for tensor in self._state] != self._needed:
            return "changed"
        # The program sets gradients where the function would add to those that are there.
        if any(tensor.grad is not None for tensor in self._grads):
            return "gradients"
        # An input that is also state, which is written: the program knows them as two variables.
        if self._written and any(
            leaf.untyped_storage().data_ptr() in self._written for leaf in leaves
        ):
            return "other_shapes"
        if _settings() != self._settings or not self._is_unchanged(args):
            return "changed"
        return None

    def _is_unchanged(self, args: tuple[Any, ...]) -> bool:
        """Whether the function reads what it has read, and computes the same in the modes of now."""
        modes = _modes()
        if modes not in self._guards:
            try:
                self._guards[modes] = self._in_other_modes(args)
            except WritingError:  # this call fills a cache: a later one may not
                return False
        guards = self._guards[modes]
        return guards is not None and guards.holds({"fn": self._fn, "args": args})

    def _in_other_modes(self, args: tuple[Any, ...]) -> Guards | None:
        """What the function reads in the modes of now; None where it is another program in them."""
        try:
            guards = read_function(self._fn, args)
        except UnreadableError:
            return None
        first = self._first
        # Equal guards are not enough: the same values can be read by another branch of the code.
        is_same = guards.graph == first.graph and guards.places == first.places
        return guards if is_same else None


def _is_gradient(write: Write) -> bool:
    """Whether it is a gradient, which the traced program writes as well."""
    return write.what.endswith(".grad")


def _modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _spec(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return None  # as no example's, which are tensors all
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


def _settings() -> tuple[Any, ...]:
    """What decides which operators run, besides the function."""
    return (*casting(), torch.are_deterministic_algorithms_enabled())
