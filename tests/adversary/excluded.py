"""What fails at present, by mode, and why: left out of the programs of the tests, until it is cured.

`run.py --each --once` runs everything; its report says what is listed here and fails no longer. To cure
something, remove its words here and see the tests pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Exclusion(NamedTuple):
    """Features, `feature/change`s, changes, inputs and contexts that some modes get wrong."""

    why: str
    modes: tuple[str, ...]
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words of `text`, which semicolons part."""
        return tuple(word for part in self.text.split(";") if (word := " ".join(part.split())))


REPLAYED = (
    *("step:graph", "step:compiled+graph", "step:regional+graph"),
    *("step:model-graph", "step:compiled+model-graph"),
)
ON_GPUS = tuple(f"{mode}@cuda" for mode in REPLAYED)
GUARDED = (
    *("step:compiled", "step:regional", "step:auto"),
    *("step:compiled+graph", "step:regional+graph", "step:compiled+model-graph"),
)
"""A device is left out: what a mode gets wrong, it does on each."""

EXCLUDED: tuple[Exclusion, ...] = (
    Exclusion(
        "Torch's foreach optimizers refuse weights whose sign is only noted; replayed steps train them.",
        REPLAYED,
        "weight's sign noted",
    ),
    Exclusion(
        "Fused Adam does not keep a NaN as the largest of its averages (amsgrad); the weights are NaN in each form.",
        REPLAYED,
        "number/to nan",
    ),
    Exclusion(
        "torch's compiler looks for a hook at another place where one was put before it, and fails (2.11).",
        ("call:compiled", *GUARDED),
        "forward hook/before the first" if torch.__version__ < "2.12" else "",
    ),
    Exclusion(
        "Where torch's compiler has to read a step in one piece, it raises what code would have caught.",
        ("step:compiled+graph", "step:regional+graph"),
        "error of torch's caught/too wide",
    ),
    Exclusion(
        "torch's compiler does not look again for special methods that a class has not; captured programs do.",
        GUARDED,
        "truth of an object/on the class",
    ),
    Exclusion(
        "Nesterov momentum in torch's form for many tensors at once, which a user can ask for later, writes into "
        "gradients; the fused form, which replays take, leaves them.",
        REPLAYED,
        "nesterov",
    ),
    Exclusion(
        "Torch's foreach optimizers update weights that share memory at the same time on a GPU: what plain PyTorch "
        "makes of them is chance; replayed steps update one after another.",
        ON_GPUS,
        "data shared",
    ),
)


def excluded(mode: str) -> frozenset[str]:
    """The words that programs for a mode go without."""
    names = {mode, mode.partition("@")[0]}
    return frozenset(word for e in EXCLUDED if names.intersection(e.modes) for word in e.words)
