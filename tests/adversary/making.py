"""From a seed to a program: features at sites, and calls with changes between them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection

from adversary.grammar import catalogue
from adversary.program import Call, Change, Program, Purpose, Site, Use

CHANGES = 5
MOST_FEATURES = 3


def make(
    seed: int,
    purpose: Purpose,
    excluded: Collection[str] = (),
    warm_calls: int = 2,
) -> Program:
    """The program of a seed, without what is excluded by name (`feature`, `feature/change`, ...)."""
    draw = random.Random(seed)
    uses = _uses(draw, purpose, excluded)
    changes = _changes(purpose, uses, excluded)
    calls = [Call()] * warm_calls
    for _ in range(CHANGES):
        calls += _changed(draw, purpose, changes, excluded)
    optimizers = [name for name in catalogue.OPTIMIZERS if name not in excluded]
    optimizer = draw.choice(optimizers) if purpose == "step" else "sgd"
    return Program(seed, purpose, tuple(uses), tuple(calls), optimizer)


def each(purpose: Purpose, warm_calls: int = 2) -> list[Program]:
    """For every entry of the grammar a program with little else, whatever the seeds are."""
    found: list[tuple[tuple[Use, ...], Call, str]] = []
    for name in _features(purpose, ()):
        feature = catalogue.FEATURES[name]
        sites: tuple[Site, ...] = ("loss",) if feature.is_loss else ("net", "block")
        for site in sites[:1] if feature.result else sites:
            uses = (Use(0, name, site),)
            found.append((uses, Call(), "sgd"))
            found += [(uses, Call(Change(0, change)), "sgd") for change in feature.changes]
    momentum = "momentum" if purpose == "step" else "sgd"
    found += [((), Call(change), momentum) for change in _changes(purpose, [], ())]
    found += [((), Call(input=name), "sgd") for name in catalogue.INPUTS]
    found += [((), Call(context=name), "sgd") for name in _contexts(purpose, ())]
    if purpose == "step":
        rate = Call(Change(None, "learning rate"))
        found += [((), rate, name) for name in catalogue.OPTIMIZERS]
    warm = (Call(),) * warm_calls
    return [
        Program(
            number,
            purpose,
            uses,
            (*warm, call, dataclasses.replace(call, change=None), Call()),
            opt,
        )
        for number, (uses, call, opt) in enumerate(found)
    ]


def _features(purpose: Purpose, excluded: Collection[str]) -> list[str]:
    return [
        name
        for name, feature in catalogue.FEATURES.items()
        if purpose in feature.purposes and name not in excluded
    ]


def _contexts(purpose: Purpose, excluded: Collection[str]) -> list[str]:
    barred = (*excluded, "plain", *(catalogue.WITHOUT_GRADIENTS if purpose == "step" else ()))
    return [name for name in catalogue.CONTEXTS if name not in barred]


def _uses(draw: random.Random, purpose: Purpose, excluded: Collection[str]) -> list[Use]:
    names = _features(purpose, excluded)
    chosen = draw.sample(names, min(len(names), draw.randint(1, MOST_FEATURES)))
    return [Use(number, name, _site(draw, name)) for number, name in enumerate(chosen)]


def _site(draw: random.Random, name: str) -> Site:
    feature = catalogue.FEATURES[name]
    if feature.is_loss:
        return "loss"
    return "net" if feature.result or draw.random() < 0.5 else "block"


def _changes(purpose: Purpose, uses: list[Use], excluded: Collection[str]) -> list[Change]:
    """Those of the features, each as likely as all general ones together."""
    own = [
        Change(use.number, name)
        for use in uses
        for name in catalogue.FEATURES[use.feature].changes
        if f"{use.feature}/{name}" not in excluded
    ]
    general = [
        Change(None, name)
        for name in catalogue.CHANGES
        if name not in excluded and (purpose == "step" or name not in catalogue.STEP_CHANGES)
    ]
    return own * max(1, len(general) // max(1, len(own))) + general


def _changed(
    draw: random.Random, purpose: Purpose, changes: list[Change], excluded: Collection[str]
) -> list[Call]:
    """A call after a change, in a context or with an input; and one more like it, or a plain one."""
    inputs = [name for name in catalogue.INPUTS if name not in (*excluded, "plain")]
    contexts = _contexts(purpose, excluded)
    chance = draw.random()
    if chance < 0.15 and inputs:
        first = Call(input=draw.choice(inputs))
    elif chance < 0.3 and contexts:
        first = Call(context=draw.choice(contexts))
    else:
        first = Call(change=draw.choice(changes)) if changes else Call()
    again = Call(input=first.input, context=first.context) if draw.random() < 0.5 else Call()
    return [first, again]
