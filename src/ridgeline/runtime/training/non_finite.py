"""Why a loss stopped being finite: tried with the present weights, then with the last good ones.

By the time a bad loss is seen the optimizer has usually spread it into every parameter. Then the same
batch is run again with the weights of the last checkpoint (or the initial ones), which separates
a bad batch or operator from weights that diverged in between.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ridgeline.plan import Precision
from ridgeline.runtime.training import training_state
from ridgeline.runtime.training.diagnose import find_non_finite
from ridgeline.runtime.training.task import Task
from ridgeline.state import random_state
from ridgeline.tensors.batch import to_device

NOT_FOUND = "no cause was found, for the search ended with "
LONGEST_FAILURE = 300


def explained(search: Callable[[], str]) -> str:
    """What a search for the cause finds, or what ended it: the other workers wait for one of the two."""
    try:
        return search()
    except Exception as error:  # noqa: BLE001 - the task's model, data and loss run there, and raise anything
        text = " ".join(str(error).split())[:LONGEST_FAILURE]
        return f"{NOT_FOUND}{type(error).__name__}: {text}"


def first_cause(texts: Sequence[str]) -> tuple[int, str]:
    """The first cause that was found, with its place; where none was, the first search that failed.

    Args:
        texts: Of `explained`, by worker; one at least is not empty.
    """
    told = [(place, text) for place, text in enumerate(texts) if text]
    return min(told, key=lambda each: each[1].startswith(NOT_FOUND))


def explain(
    task: Task,
    model: nn.Module,
    batch: Any,
    *,
    seed: int,
    last_good: Path | None,
    device: torch.device,
    precision: Precision = "as-is",
) -> str:
    """The cause in words, from one or two watched steps on a copy of the model.

    Args:
        task: Makes the copy, free of hooks.
        model: Holds the weights after the bad step.
        batch: The batch whose loss was not finite.
        seed: Of the run, for the initial weights.
        last_good: The newest good checkpoint, or None.
        device: Where to run.
        precision: Of the plan: what overflows in it may be finite in another one.

    Raises:
        CheckpointError: the last good checkpoint is damaged.
    """
    batch = to_device(batch, device)
    random_state.seed_all(seed)
    copy = task.model().to(device)
    # Cloned before they are overwritten: without a checkpoint they are the last good ones.
    initial = {name: value.clone() for name, value in copy.state_dict().items()}
    copy.load_state_dict(model.state_dict())
    loss_fn = task.loss_fn
    if precision == "bf16":  # the others change no dtype
        # Here, since what reads programs takes long to import, and nearly no run comes to this.
        from ridgeline.runtime.steps.whole_step.reads import cast_loss_program

        loss_fn = partial(cast_loss_program, task.loss_fn, kind=device.type)
    now = find_non_finite(copy, loss_fn, batch)
    if now is None:
        how = "" if precision == "as-is" else f" in {precision}"
        return f"the step is finite when run again{how}; its randomness (dropout, say) decides"
    if not now.startswith(("parameter", "buffer")):
        return now
    state = training_state.model_state(last_good) if last_good is not None else initial
    which = f"the weights of {last_good.name}" if last_good is not None else "the initial weights"
    copy.load_state_dict(state)
    before = find_non_finite(copy, loss_fn, batch)
    if before is None:
        return f"{now}; with {which} the same batch is finite, so the weights ran away since then"
    return f"with {which} already, {before}"
