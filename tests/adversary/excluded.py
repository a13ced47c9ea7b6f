"""What fails at present, by mode, and why: left out of the programs of the tests, until it is cured.

`run.py --each --once` runs everything; its report says what is listed here and fails no longer. To cure
something, remove its words here and see the tests pass.
"""

from __future__ import annotations

from typing import NamedTuple


class Exclusion(NamedTuple):
    """Words of programs (features, `feature/change`s, changes, inputs, contexts) that some modes get wrong."""

    why: str
    modes: tuple[str, ...]
    words: tuple[str, ...]


EXCLUDED: tuple[Exclusion, ...] = ()


def excluded(mode: str) -> frozenset[str]:
    """The words that programs for a mode go without."""
    return frozenset(word for entry in EXCLUDED if mode in entry.modes for word in entry.words)
