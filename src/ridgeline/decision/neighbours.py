"""The steps of a process know of each other: two of them may train, or read, the same modules.

A plan changes what a step's modules are laid out like in memory, which other steps see.
"""

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ridgeline.planner import Ranking
from ridgeline.reach.moved_draws import moved_draws

if TYPE_CHECKING:
    from torch import nn

_STEPS: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Neighbour(Protocol):
    """What of a step others ask for."""

    model: "nn.Module"
    loss_fn: Any


def join(step: Neighbour) -> None:
    """A step is there, until nothing holds it any more: a closed one may be called by hand."""
    _STEPS.add(step)


def why_as_is(script: "tuple[nn.Module, Any, Any]") -> str:
    """Why the weights of a script's model are to keep their order in memory; empty where they need not.

    Cost: See `moved_draws`, for each other step.
    """
    model, loss_fn, _ = script
    others = (step for step in list(_STEPS) if (step.model, step.loss_fn) != (model, loss_fn))
    places = (moved_draws(model, step.model, step.loss_fn) for step in others)
    place = next((place for place in places if place), "")
    return place and (
        f"another step runs modules of this one, and draws random numbers for what they compute, in {place}: "
        "with the channels innermost these would land in other pixels; allow=('random',) compares it too"
    )


def explained(ranking: Ranking, why: str) -> Ranking:
    """The ranking, whose best plan says why its memory format is no other."""
    first, *others = ranking.candidates
    choices = tuple(
        msgspec.structs.replace(choice, origin="default", reason=why)
        if choice.knob == "memory_format"
        else choice
        for choice in first.plan.choices
    )
    plan = msgspec.structs.replace(first.plan, choices=choices)
    best = msgspec.structs.replace(first, plan=plan)
    return msgspec.structs.replace(ranking, candidates=(best, *others))
