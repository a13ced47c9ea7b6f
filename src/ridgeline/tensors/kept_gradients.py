"""Whether somebody keeps a gradient that a replay will write over: a plain step leaves it as it is."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import gt

import torch
from torch import Tensor

from ridgeline.reach.sparse import is_sparse, parts
from ridgeline.tensors.sameness import Sameness

_num_uses = torch._C._storage_Use_Count  # noqa: SLF001 - as torch's own trees of graphs ask it
"""How many tensors share memory; Python's objects for that memory count, too."""


def num_uses(tensor: Tensor) -> int:
    """How many tensors lie in the memory of one, itself and Python's objects for that memory included."""
    return _num_uses(tensor.untyped_storage()._cdata)  # noqa: SLF001


def is_kept(parameter: Tensor) -> bool:
    """Whether others than a parameter hold its gradient, or a tensor in the memory of that.

    Args:
        parameter: It has a gradient. Whoever asks must not refer to that: it would count.
    """
    if is_sparse(parameter.grad):  # type: ignore[arg-type] - it has one
        return True  # in several places; nobody is helped by knowing
    alone = torch.empty(0, requires_grad=True, device="cpu")
    alone.grad = torch.empty(0, device="cpu")
    return any(map(gt, _references(parameter), _references(alone)))


def _references(parameter: Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    assert gradient is not None
    return sys.getrefcount(gradient), _num_uses(gradient.untyped_storage()._cdata)  # noqa: SLF001


class KeptGradients:
    """Gradients in the memory of a graph, and how often they are referred to while nobody keeps them.

    Args:
        pairs: Parameters and the gradients that replays write, some None.
        added_to: Numbers of the parameters whose gradients a step adds to, so that one which is still its
            parameter's may be held.

    Cost: Sets each gradient of a parameter three times.
    """

    def __init__(
        self, pairs: Iterable[tuple[Tensor, Tensor | None]], added_to: Collection[int]
    ) -> None:
        self._added_to = added_to
        self._pairs = [
            (parameter, gradient, part.untyped_storage())
            for parameter, gradient in pairs
            if gradient is not None
            for part in parts(gradient)
        ]
        self._gradients = [gradient for _, gradient, _ in self._pairs]
        self._memory = [storage._cdata for _, _, storage in self._pairs]  # noqa: SLF001 - its number
        # Nothing here may refer to a gradient while it is counted.
        shown = [parameter.grad is gradient for parameter, gradient, _ in self._pairs]
        others = [
            None if is_it else pair[0].grad for is_it, pair in zip(shown, self._pairs, strict=True)
        ]
        self._show([True] * len(shown), others)
        self._shows_all = self._compiled()
        self._shown = self._counts()
        self._show([False] * len(shown), others)
        self._hidden = self._counts()
        self._show(shown, others)

    def _show(self, shown: Sequence[bool], others: Sequence[Tensor | None]) -> None:
        for is_shown, other, (parameter, gradient, _) in zip(
            shown, others, self._pairs, strict=True
        ):
            parameter.grad = gradient if is_shown else other

    def _compiled(self) -> Callable[[], bool]:
        same = Sameness()
        for parameter, _, _ in self._pairs:
            same.attribute(parameter, "grad")
        return same.compiled()

    def are_alone(self) -> bool:
        """Whether parameters have all of them, and nobody else has any; False where that takes a closer look.

        Cost: 0.15 us a gradient.
        """
        # In one function, as it runs before each step.
        return (
            [*map(sys.getrefcount, self._gradients)] == self._shown[0]
            and [*map(_num_uses, self._memory)] == self._shown[1]
            and self._shows_all()
        )

    def are_any(self) -> bool:
        """Whether a gradient, or a tensor in its memory, is held by others than its parameter."""
        return any(held or views for _, held, views in self.found())

    def found(self) -> list[tuple[Tensor, bool, bool]]:
        """Each gradient, whether others hold it, and whether others hold tensors in its memory."""
        counts = self._counts()
        found: list[tuple[Tensor, bool, bool]] = []
        for place, (parameter, gradient, _) in enumerate(self._pairs):
            is_shown = parameter.grad is gradient
            usual = self._shown if is_shown else self._hidden
            held, views = (now[place] > own[place] for now, own in zip(counts, usual, strict=True))
            counts_here = not (is_shown and id(parameter) in self._added_to)
            found.append((gradient, held and counts_here, views and counts_here))
        return found

    def _counts(self) -> tuple[list[int], list[int]]:
        return [*map(sys.getrefcount, self._gradients)], [*map(_num_uses, self._memory)]


class KeptMemory:
    """The memory of gradients in a graph, of which each backward pass gives parameters other tensors.

    Args:
        pairs: Parameters, which have none of them yet, and the gradients that replays write, some None.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        found = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        self._parameters = [parameter for parameter, _ in found]
        self._storages = [[part.untyped_storage() for part in parts(g)] for _, g in found]
        self._memory = [[storage._cdata for storage in held] for held in self._storages]  # noqa: SLF001
        self._usual = self._counts()

    def is_used(self) -> bool:
        """Whether tensors lie there that are no parameter's gradient.

        Cost: 0.3 us a gradient.
        """
        now = self._counts()
        if now == self._usual:
            return False
        shown = {id(parameter) for parameter, _ in self._shown()}
        return any(
            count > own + (id(parameter) in shown)
            for parameter, counts, usual in zip(self._parameters, now, self._usual, strict=True)
            for count, own in zip(counts, usual, strict=True)
        )

    def shown(self) -> list[Tensor]:
        """The gradients of parameters that lie there."""
        return [gradient for _, gradient in self._shown()]

    def _shown(self) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter, memory in zip(self._parameters, self._memory, strict=True):
            gradient = parameter.grad
            if gradient is not None and _numbers(gradient) == memory:
                yield parameter, gradient

    def _counts(self) -> list[list[int]]:
        return [[*map(_num_uses, memory)] for memory in self._memory]


def _numbers(gradient: Tensor) -> list[int]:
    """Of the memory in which its parts lie."""
    return [part.untyped_storage()._cdata for part in parts(gradient)]  # noqa: SLF001
