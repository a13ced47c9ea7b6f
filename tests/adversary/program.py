"""A program as data: what a model and its loss are made of, and the calls with what changes before them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

Purpose = Literal["call", "step"]
Site = Literal["net", "block", "loss", "optimizer"]


@dataclasses.dataclass(frozen=True)
class Use:
    """A feature at a place of the program; `number` makes its names its own."""

    number: int
    feature: str
    site: Site


@dataclasses.dataclass(frozen=True)
class Change:
    """Something done before a call: an entry of the feature numbered `number`, or a general one (None)."""

    number: int | None
    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: what changes before it, what it is given, and the context it is made in."""

    change: Change | None = None
    input: str = "plain"
    context: str = "plain"

    @property
    def is_plain(self) -> bool:
        """Whether it is a call like the first one."""
        return self == Call()


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, a loss and an optimizer with a history of calls; for calls of the model or for training."""

    seed: int
    purpose: Purpose
    uses: tuple[Use, ...]
    calls: tuple[Call, ...]
    optimizer: str = "sgd"

    def words(self) -> tuple[str, ...]:
        """The names of everything in it: what an exclusion may name."""
        features = {use.number: use.feature for use in self.uses}
        found = [*features.values(), self.optimizer]
        for call in self.calls:
            found += [call.input, call.context]
            if call.change is not None:
                owner = (
                    features.get(call.change.number, "") if call.change.number is not None else ""
                )
                found.append(f"{owner}/{call.change.name}" if owner else call.change.name)
        return tuple(dict.fromkeys(word for word in found if word not in ("plain", "sgd")))


def to_json(program: Program) -> str:
    """One line."""
    return json.dumps(dataclasses.asdict(program))


def from_json(text: str) -> Program:
    """The program that `to_json` wrote."""
    data: dict[str, Any] = json.loads(text)
    calls = tuple(
        Call(
            None if call["change"] is None else Change(**call["change"]),
            call["input"],
            call["context"],
        )
        for call in data["calls"]
    )
    return Program(
        data["seed"],
        data["purpose"],
        tuple(Use(**use) for use in data["uses"]),
        calls,
        data["optimizer"],
    )
