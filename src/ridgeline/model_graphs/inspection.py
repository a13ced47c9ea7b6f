"""What in one call of a model, or in its backward pass, a CUDA graph cannot hold."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.errors import ObstacleError
from ridgeline.lint.lint import Lint, as_if_capturing, judge_python
from ridgeline.lint.lint_observer import Observation, watching
from ridgeline.lint.python_state import changed_in_python
from ridgeline.model_graphs.captured import gradients_of, nodes_behind
from ridgeline.programs.compiling import called_by
from ridgeline.reach.undo import Undo
from ridgeline.state.saved_state import module_kept
from ridgeline.tensors.copies import own_copy

Run = Callable[..., tuple[Tensor, ...]]
_REENTRANT = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint, which raises where gradients are returned and not accumulated."""


def inspect_model(
    model: nn.Module, run: Run, tensors: Sequence[Tensor], *, device: str | torch.device
) -> Lint:
    """Call a model twice with its backward pass, and watch the second time.

    Buffers, random state and what the model keeps in Python are put back; what of that the second call
    changed is a finding.

    Args:
        model: Of whose parameters gradients are computed.
        run: The call, of tensors.
        tensors: Its arguments; the calls get copies.
        device: What is to be captured, `cuda`; `cpu` to lint on a host without a GPU.

    Raises:
        ObstacleError: the model changes an argument in place, no result depends on its parameters, or it has
            reentrant activation checkpoints.

    Cost: Two calls with backward passes, the watched one some ten times slower, and a copy of the buffers.
    """
    kind = torch.device(device).type
    seen = Observation(kind, sys._getframe())  # noqa: SLF001 - lines are searched up to here
    before = Undo(model, spared=(*model.parameters(), *model.buffers()))
    try:
        # What the script itself has given to `torch.compile` is watched as it was written.
        with module_kept(model, parameters=False), torch.compiler.set_stance("force_eager"):
            # The first call may fill caches, which no later one does.
            for watch in (contextlib.nullcontext(), watching(seen)):
                given = [own_copy(tensor) for tensor in tensors]
                python = Undo(model, values=False, arrays=True)
                with watch, as_if_capturing(kind, seen):
                    seen.lines.phase = "forward"
                    outputs = [out for out in run(*given) if out.requires_grad]
                    _check(model, given, outputs)
                    seen.lines.phase = "backward"
                    # Zeros will do: operators are watched, not values.
                    seeds = [torch.zeros_like(out) for out in outputs]
                    gradients_of(outputs, (*given, *model.parameters()), seeds)
            judge_python(seen, python, (*model.parameters(), *model.buffers()))
    finally:
        seen.lines.outermost = None
        before.restore()
    return Lint(seen.findings, seen.doubts)


def changed_by_loss(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any
) -> str:
    """What a loss function changes in Python of what its model's code names, in words; empty where nothing.

    A temperature or a mask that it sets, a hidden state that it hands on: a replayed model would read what
    was there when it was captured. Buffers, random state, and what both keep in Python are put back.

    Args:
        model: Called by the loss function; what it changes itself does not count here.
        loss_fn: Called twice, as the first time may fill caches.
        batch: Tensors in it are copied.

    Cost: Two forward passes, and a copy of the buffers.
    """
    found: list[str] = []
    python = Undo(model, values=False, arrays=True)

    def look() -> None:
        what = changed_in_python(python)
        if what:
            found.append(what)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal python
        look()
        result = model._call_impl(*args, **kwargs)  # noqa: SLF001 - `__call__` as it was written
        python = Undo(model, values=False, arrays=True)
        return result

    before = Undo(model, loss_fn, batch)
    try:
        with called_by([(model, call)]), module_kept(model, parameters=False):
            for _ in range(2):
                found.clear()
                python = Undo(model, values=False, arrays=True)
                loss_fn(model, pytree.tree_map_only(Tensor, own_copy, batch))
                look()
    finally:
        before.restore()
    return found[0] if found else ""


def _check(model: nn.Module, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    if any(tensor._version for tensor in given):  # noqa: SLF001 - the only word on changes in place
        raise ObstacleError(
            f"wanted a model whose arguments stay as they are, got {type(model).__name__}, which changes one "
            "in place; have it change a copy, or use an execution mode without a graph"
        )
    if not outputs:
        raise ObstacleError(
            f"wanted a model with a result that depends on its parameters, got none from "
            f"{type(model).__name__}; use an execution mode without a graph"
        )
    if any(type(node).__name__ == _REENTRANT for node in nodes_behind(outputs)):
        raise ObstacleError(
            f"wanted activation checkpoints that a graph of {type(model).__name__} can hold, got "
            "torch.utils.checkpoint with use_reentrant=True, which takes a backward pass of its own; give it "
            "use_reentrant=False, or use another execution mode"
        )
