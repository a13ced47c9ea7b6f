"""A world: one copy of a program with a way to run it. Plain PyTorch is the oracle of every mode."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ridgeline as rl
from adversary.devices import device_of, execution_of, is_emulated
from adversary.portraits import Portrait
from adversary.program import Purpose
from emulated_graphs import emulated_graphs

CALL_MODES = ("eager", "script", "compiled", "regional", "packaged", "auto")
STEP_MODES = ("eager", "compiled", "regional", "step-graph", "packaged", "auto")
ONE_PROGRAM = ("step-graph", "packaged", "auto")
"""Training modes in which gradients never reach `.grad`, as is documented, or which may choose such a one."""
SECONDS = 4.0
"""What the choice of a plan may take: enough to try what compiles, where that is interpreted."""
MODES = (*(f"call:{name}" for name in CALL_MODES), *(f"step:{name}" for name in STEP_MODES))


def purpose_of(mode: str) -> Purpose:
    """What a mode is for: the first half of its name."""
    return "call" if mode.startswith("call:") else "step"


_numbers = itertools.count()


class World:
    """One copy of the program file, its model, loss and optimizer, and `run`, which makes one call."""

    def __init__(self, path: Path, *, is_replayed: bool = False) -> None:
        self._is_replayed = is_replayed
        self.name = f"adversary_program_{next(_numbers)}"
        spec = importlib.util.spec_from_file_location(self.name, path)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[self.name] = self.module  # dataclasses look themselves up
        spec.loader.exec_module(self.module)
        self.w: types.SimpleNamespace = self.module.make()
        self.result: Any = None
        self.run: Callable[[Any], Any] = self.w.model
        self.before: Callable[[], Any] = lambda: None

    def call(self, index: int) -> None:
        """Make call number `index`, with what changes before it; `before` is called between the two."""
        self.result = None

        def run(x: Any) -> Any:
            self.before()
            return self.run(x)

        self.result = self.module.CALLS[index](self.w, run)

    def portrait(self, *, with_gradients: bool) -> dict[str, Any]:
        """All that the call may have changed."""
        portrait = Portrait(with_gradients=with_gradients, is_replayed=self._is_replayed)
        portrait.draw("w.model", self.w.model)
        portrait.draw("w.loss_fn", self.w.loss_fn)
        portrait.draw("w.optimizer", self.w.optimizer)
        for name, value in vars(self.module).items():
            if not name.startswith("__") and not isinstance(
                value, (types.ModuleType, types.FunctionType)
            ):
                portrait.draw(f"globals()[{name!r}]", value)
        portrait.draw("result", self.result)
        return portrait.leaves

    def close(self) -> None:
        """Forget the copy."""
        sys.modules.pop(self.name, None)


def run_plain_call(world: World) -> None:
    """The contract of `rl.hybridize`: no gradients, unless an argument asks for them."""
    model = world.w.model

    def run(x: Any) -> Any:
        if torch.is_grad_enabled() and torch.is_tensor(x) and x.requires_grad:
            return model(x)
        with torch.no_grad():
            return model(x)

    world.run = run


def run_plain_step(world: World) -> None:
    """The loop that everybody writes."""
    w = world.w

    def run(x: Any) -> Tensor:
        w.optimizer.zero_grad(set_to_none=True)
        loss = w.loss_fn(w.model, x)
        loss.backward()
        w.optimizer.step()
        return loss.detach()

    world.run = run


@contextmanager
def in_mode(world: World, mode: str) -> Iterator[None]:
    """Have the world's calls made by Ridgeline in a mode, `call:script` say."""
    with emulated_graphs() if is_emulated(mode) else nullcontext(), _in_mode(world, mode):
        yield


@contextmanager
def _in_mode(world: World, mode: str) -> Iterator[None]:
    execution, w = execution_of(mode), world.w
    if purpose_of(mode) == "call":
        example, seconds = world.module.x_of(0), SECONDS
        with rl.hybridize(
            w.model, example, mode=execution, max_shapes=4, budget_s=seconds
        ) as hybrid:
            world.run = hybrid
            yield
    else:
        plan = "auto" if execution == "auto" else rl.Plan(execution=execution)
        seconds = SECONDS if execution == "auto" else None
        with rl.TrainStep(
            w.model, w.loss_fn, w.optimizer, plan, device=device_of(mode), seconds=seconds
        ) as step:
            world.run = step
            yield
