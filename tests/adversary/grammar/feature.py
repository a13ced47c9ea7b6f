"""What a feature is: fragments of text that are put together with those of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Feature:
    """A few lines that a program may contain, and the changes that they invite.

    In the texts `$n` is the number of the use, `$owner` how a change reaches the object whose class it is in,
    and `$cls` that class. Fragments:

    Args:
        name: What reports and exclusions call it.
        forward: Lines of `forward` over `self` and `y` (of shape (n, 4)); in a loss, over `model`, `x`, `y`
            (the model's result) and `loss`.
        init: Lines of `__init__`; of a loss, lines of the function that makes it.
        top: Definitions of the file.
        methods: Lines of the class.
        bases: Further base classes of the class.
        each: Lines before every call; `w` has `model`, `loss_fn` and `optimizer`.
        params: An expression over `model`: more parameters for the optimizer.
        result: An expression over `y`: what the model returns instead of it (calls only).
        changes: Name to lines over `w`.
        is_loss: It is part of a loss, not of a model.
        purposes: What it is for.
    """

    name: str
    forward: str = ""
    init: str = ""
    top: str = ""
    methods: str = ""
    bases: str = ""
    each: str = ""
    params: str = ""
    result: str = ""
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_loss: bool = False
    purposes: tuple[str, ...] = ("call", "step")
