"""What a step shows under a name may be kept: later replays leave it as it is. Graphs are emulated."""

import argparse
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep

NUM_STEPS = EAGER_STEPS + 3


class Pair(NamedTuple):
    loss: Tensor
    parts: list[Any]


@dataclass(frozen=True)
class Logged:
    loss: Tensor
    inner: dict[str, Tensor]


class Shown:
    """An object of a class like any other."""

    def __init__(self, loss: Tensor, out: Tensor) -> None:
        self.loss, self.parts, self.itself = loss, [{"out": out}], self


class Slotted:
    __slots__ = ("__out", "loss")

    def __init__(self, loss: Tensor, out: Tensor) -> None:
        self.loss, self.__out = loss, out

    def out(self) -> Tensor:
        return self.__out


SHAPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tensor": lambda loss, out: loss,
    "a dictionary": lambda loss, out: {"loss": loss, "out": out},
    "tuples and lists": lambda loss, out: Pair(loss, [out, (loss, 3)]),
    "a dataclass": lambda loss, out: Logged(loss, {"out": out}),
    "an object": Shown,
    "slots": Slotted,
    "a list of objects": lambda loss, out: [Shown(loss, out), Slotted(loss, out)],
    "a namespace": lambda loss, out: argparse.Namespace(loss=loss, out=out),
    "a dataclass of objects": lambda loss, out: Logged(loss, {"out": Shown(loss, out)}),
    "a set": lambda loss, out: {loss},
}


class Trainer:
    """Keeps what the last step has logged, anew each time or in one dictionary."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        self.shape, self.logged, self.logs = shape, None, dict[str, Any]()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        loss = out.square().mean()
        self.logged = self.shape(loss.detach(), out.detach())
        self.logs["same"] = self.logged
        return loss


def history(execution: Execution, shape: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    torch.manual_seed(0)
    model, trainer = nn.Linear(4, 2), Trainer(shape)
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), list[Any]()
    plan = Plan(execution=execution)
    with (
        emulated_graphs(),
        PlannedStep(model, trainer.loss, optimizer, plan, device="cpu") as step,
    ):
        for number in range(NUM_STEPS):
            step(torch.full((3, 4), 0.1 * number))
            kept += [trainer.logged, trainer.logs["same"]]
    return kept


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("execution", ["graph"])
def test_a_history_of_what_was_logged_is_that_of_eager_steps(
    name: str, execution: Execution
) -> None:
    found, wanted = (history(one, SHAPES[name]) for one in (execution, "eager"))
    for mine, plain in zip(found, wanted, strict=True):
        assert type(mine) is type(plain)
        torch.testing.assert_close(leaves(mine), leaves(plain), rtol=0, atol=0)


def leaves(value: Any) -> list[Any]:
    return [*all_leaves(value)]


def all_leaves(value: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves([*value] if isinstance(value, set) else value):
        if isinstance(leaf, Logged):
            yield from all_leaves([leaf.loss, leaf.inner])
        elif isinstance(leaf, Shown):
            assert leaf.itself is leaf
            yield from all_leaves([leaf.loss, leaf.parts])
        elif isinstance(leaf, Slotted):
            yield from all_leaves([leaf.loss, leaf.out()])
        else:
            yield from all_leaves(vars(leaf)) if isinstance(leaf, argparse.Namespace) else [leaf]


def test_one_tensor_under_two_names_stays_one() -> None:
    class Naming(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.first = self.second = super().forward(x)
            return self.first

    model = Naming(4, 2)
    optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution="graph")
    with (
        emulated_graphs(),
        PlannedStep(model, squared, optimizer, plan, device="cpu") as step,
    ):
        for number in range(NUM_STEPS):
            step(torch.full((3, 4), 0.1 * number))
            assert model.first is model.second
            assert model.first.requires_grad


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_what_a_replayed_model_shows_may_be_kept() -> None:
    class Showing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.shown = out.detach()
            return out

    kept = []
    for execution in ("model-graph", "eager"):
        torch.manual_seed(0)
        model = Showing(4, 2)
        optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution=execution)
        with (
            emulated_graphs(),
            PlannedStep(model, squared, optimizer, plan, device="cpu") as step,
        ):
            shown = []
            for number in range(4):
                step(torch.full((3, 4), 0.1 * number))
                shown.append(model.shown)
        kept.append(shown)
    torch.testing.assert_close(*kept, rtol=0, atol=0)


def test_what_is_handed_from_name_to_name_is_refused() -> None:
    """A replay would leave the older name as it was, step after step."""

    class HandingOn(nn.Linear):
        last: Tensor | None = None
        older: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.older, self.last = self.last, out.detach()
            return out

    model = HandingOn(4, 2)
    model.last = model.older = torch.zeros(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for execution in ("graph", "model-graph"):
        plan = Plan(execution=execution)
        with (
            emulated_graphs(),
            PlannedStep(model, squared, optimizer, plan, device="cpu") as step,
            pytest.raises(ObstacleError, match="got a change of 'older' in Python"),
        ):
            step(torch.ones(3, 4))


def train(execution: Execution, loss_fn: Callable[[nn.Module, Tensor], Tensor], look: Any) -> Any:
    """What `look` shows after each of some steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution=execution)
    with (
        emulated_graphs(),
        PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step,
    ):
        seen = []
        for number in range(NUM_STEPS):
            step(torch.full((3, 4), 0.1 * number))
            seen.append(look(model))
    return seen


def test_an_object_that_stays_gets_new_tensors() -> None:
    """In its attributes, those of a thread, and those of a class."""
    here = threading.local()
    # Before torch 2.13 programs that assign to a class are refused.
    kept = [type("Kept", (), {})] if torch.__version__ >= "2.13" else []
    for shown in (argparse.Namespace(), here, *kept):
        shown.last = None

        def loss_fn(model: nn.Module, batch: Tensor, shown: Any = shown) -> Tensor:
            out = model(batch)
            shown.last = out.detach()
            return out.square().mean()

        found = [train(one, loss_fn, lambda _, s=shown: s.last) for one in ("graph", "eager")]
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_view_of_a_weight_stays_one() -> None:
    """It shows what the weight is now, however long it was kept."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        model.row = model.weight[0].detach()
        return squared(model, batch)

    rows = train("graph", loss_fn, lambda model: (model.row, model.weight))
    for row, weight in rows:
        torch.testing.assert_close(row, weight[0].detach(), rtol=0, atol=0)


HELD: dict[str, Callable[[Tensor, Any], Any]] = {
    "a function": lambda out, before: lambda: out,
    "a lock beside it": lambda out, before: argparse.Namespace(out=out, lock=threading.Lock()),
    "the one before": lambda out, before: argparse.Namespace(out=out, before=before),
    "the one before alone": lambda out, before: argparse.Namespace(before=before),
    "a count": lambda out, before: argparse.Namespace(out=out, n=1 + getattr(before, "n", 0)),
    "another name": lambda out, before: {f"out {len(before or {})}": out, **(before or {})},
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.filterwarnings("ignore:.*torch.compiler")
def test_what_cannot_be_shown_again_is_refused(name: str) -> None:
    """By the name that holds it."""

    class Holding(nn.Linear):
        shown: Any = None

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.shown = HELD[name](out.detach(), self.shown)
            return out

    model = Holding(4, 2)
    optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution="graph")
    with (
        emulated_graphs(),
        PlannedStep(model, squared, optimizer, plan, device="cpu") as step,
        pytest.raises(ObstacleError, match=r"got a change of ('shown'|the length of a dict) in Py"),
    ):
        step(torch.ones(3, 4))


@pytest.mark.parametrize("execution", ["graph", "model-graph", "step-graph"])
@pytest.mark.parametrize("kept", [argparse.Namespace(n=0), np.zeros(1)], ids=["named", "array"])
def test_counts_in_namespaces_and_arrays_go_on_or_are_refused(
    execution: Execution, kept: Any
) -> None:
    """No replay would count, and no check of a step counts, too."""
    seen = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        if isinstance(kept, np.ndarray):
            kept[0] += 1
        else:
            kept.n += 1
        return squared(model, batch)

    def look(_: Any) -> None:
        seen.append(kept[0] if isinstance(kept, np.ndarray) else kept.n)

    if isinstance(kept, np.ndarray):
        kept[0] = 0
    else:
        kept.n = 0
    if execution == "model-graph":  # whose loss runs as it was written
        train(execution, loss_fn, look)
        assert seen == [*range(1, NUM_STEPS + 1)]
    else:
        with pytest.raises(CaptureError, match=r"got (a change|one that changes) "):
            train(execution, loss_fn, look)
