"""What takes part: a contender is a way to execute, an entrant is one that has been made for a case."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ridgeline.experiments.contests import nothing
from ridgeline.experiments.hybrid.cases import HybridCase
from ridgeline.experiments.hybrid.result import Kind

Inputs = tuple[Tensor, ...]


class Remarks(NamedTuple):
    """What an entrant says about itself: what `auto` chose, and notes."""

    chosen: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A model of its own, ready to be called or trained.

    Attributes:
        model: The model, whose parameters a step changes.
        run: One call on inputs, or one step on a batch.
        load: Writes inputs where `run` reads them, for what ignores its argument; None: it reads it.
        close: Releases graphs and threads.
        remarks: What it says about itself, asked after it has run.
    """

    model: nn.Module
    run: Callable[[Inputs], Any]
    load: Callable[[Inputs], None] | None = None
    close: Callable[[], None] = nothing
    remarks: Callable[[], Remarks] = Remarks


Make = Callable[[HybridCase, float], Entrant]
"""Builds an entrant for a case; it may search for so many seconds."""


class Contender(NamedTuple):
    """A way to execute, and what builds it.

    Attributes:
        name: Its name in the table.
        kind: Whose it is.
        compilations: How many times a compiler runs, with an empty cache, until it is ready.
        make: Builds it.
    """

    name: str
    kind: Kind
    compilations: int
    make: Make
