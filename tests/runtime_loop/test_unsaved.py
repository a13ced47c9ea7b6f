"""What training changes and no `state_dict()` has is named when the first checkpoint is written."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loop_tasks
import numpy
import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Plan
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.task import Task
from ridgeline.workers.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


class Counting(loop_tasks.Net):
    """Counts its calls, in an attribute; a list of them is not looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        return super().forward(x)


class Telling(Counting):
    """Has its count saved."""

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Observing(loop_tasks.Net):
    """Has a buffer that is written, one that is made by the first batch, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6), persistent=False)
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("scale", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.zeros(6)
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.3)
        return super().forward((x - self.seen) * self.scale + self.table)


class Drawing(loop_tasks.Net):
    """Draws from a generator of its own, and from those of the process, which checkpoints hold."""

    def __init__(self, own: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.own, self.draw = own, draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(
            x * (1 + self.draw(self.own) + random.random() + numpy.random.rand())
        )


class Warming(torch.optim.SGD):
    """Counts its steps beside its state."""

    count = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step(closure)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "all saved": (loop_tasks.Net, ""),
    "extra state": (Telling, ""),
    "attribute": (Counting, "Counting.calls"),
    "inner attribute": (lambda: nn.Sequential(Counting()), "0.calls"),
    "buffer": (Observing, "the buffer seen (persistent=False)"),
    "torch": (
        lambda: Drawing(torch.Generator(), lambda own: torch.rand((), generator=own).item()),
        "a Generator of torch",
    ),
    "numpy": (
        lambda: Drawing(numpy.random.default_rng(0), lambda own: float(own.random())),
        "a Generator of numpy",
    ),
    "python": (lambda: Drawing(random.Random(0), lambda own: own.random()), "a Random of random"),
}


def told(task: Task, run_dir: Path) -> list[str]:
    said: list[str] = []
    train(task, Plan(), ALONE, run_dir=run_dir, epochs=2, checkpoint_every=4, say=said.append)
    return said


def line(names: str) -> str:
    return (
        f"checkpoints do not hold what training changes here: {names}; a resumed run begins with these as the "
        "task makes them: keep them in buffers, a module's get_extra_state() or the optimizer's state"
    )


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_changes_is_named_once(tmp_path: Path, name: str) -> None:
    """By its name; what every step finds as the first one left it is not."""
    make, names = MODELS[name]
    task = dataclasses.replace(loop_tasks.task(), model=make)
    assert told(task, tmp_path) == ([line(names)] if names else [])


def test_what_an_optimizer_changes_is_named(tmp_path: Path) -> None:
    """An attribute beside its state."""
    task = dataclasses.replace(
        loop_tasks.task(), optimizer=lambda model: Warming(model.parameters(), 0.01)
    )
    assert told(task, tmp_path) == [line("Warming.count")]
