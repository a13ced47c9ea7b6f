"""For which shapes of batches programs are made that serve one each: making one costs seconds."""

from collections import Counter
from typing import Any

from ridgeline.tensors.batch import Signature, signature
from ridgeline.tensors.constants import TensorHolder

MOST_SHAPES = 2
"""Programs: for the usual shape, and for the last batch of an epoch if it comes again."""
MOST_OTHERS = 3
"""Further shapes; where there are more, batches vary, and which of them comes twice means nothing."""
REPEATS = 4
"""A shape that is met as often before there is a program becomes the usual one."""
OTHER_SHAPES = "batches of other shapes than the captured one ran without a graph"
OTHER_LAYOUTS = (
    "batches that the code takes otherwise, because of strides or a tensor that occurs twice, ran without a "
    "graph"
)

OTHER_CONSTANTS = (
    "batches with other numbers or texts than the captured one, which has them as constants, ran as they "
    "were written; give what changes as a tensor"
)
MOST_COUNTED = 256
"""Shapes that are counted; where a number of the batch changes in every step there are no end of them."""


class UsualShapes:
    """The shapes of batches that were met, and what they are worth."""

    def __init__(self) -> None:
        self._usual: Signature | None = None
        self._others: Counter[Signature] = Counter()

    def is_usual(self, batch: Any) -> bool:
        """Whether the first program is to be made for such batches: like the first one, or most."""
        found = signature(batch)
        if self._usual is None:
            self._usual = found
        if found == self._usual:
            return True
        self._count(found)
        if self._others[found] < REPEATS:
            return False
        self._usual = found
        # Counted from the new usual one on: what was rare beside the old one may be common now.
        self._others.clear()
        return True

    def why_other(self, batch: Any, otherwise: str) -> str:
        """What to say of a batch that is not the usual one: of objects or constants where those alone differ.

        Args:
            batch: Given to `is_usual` before.
            otherwise: What is said of other shapes, `batches of other shapes than ...`.
        """
        (structure, usual), (own_structure, own) = self._usual or signature(batch), signature(batch)
        if structure != own_structure:
            return otherwise
        differing = [(a, b) for a, b in zip(usual, own, strict=True) if a != b]
        # A tensor is described by shape and type, a constant by its text.
        if differing and all(isinstance(a, str) and isinstance(b, str) for a, b in differing):
            return OTHER_CONSTANTS
        kinds = {_kind_of(a) for a, _ in differing} | {_kind_of(b) for _, b in differing}
        if len(kinds) != 1 or None in kinds:
            return otherwise
        (kind,) = kinds
        name = getattr(kind, "__name__", "")
        return (
            f"{otherwise.replace('of other shapes', f'that hold another {name}')}: programs read the tensors "
            "of the very object that they were made with; put the tensors themselves into the batch"
        )

    def is_worth_another(self, found: Signature, num_programs: int) -> bool:
        """Whether a further program is to be made for such batches, by a worker alone.

        Several workers may see different shapes, and make programs together.
        """
        self._count(found)
        is_repeated = self._others[found] > 1 and len(self._others) <= MOST_OTHERS
        return is_repeated and num_programs < MOST_SHAPES

    def _count(self, found: Signature) -> None:
        if found not in self._others and len(self._others) >= MOST_COUNTED:
            del self._others[next(iter(self._others))]  # the one that was met first
        self._others[found] += 1


def _kind_of(leaf: Any) -> type | None:
    return leaf.kind if isinstance(leaf, TensorHolder) else None
