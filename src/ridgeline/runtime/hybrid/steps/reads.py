"""What model and loss function of a traced step read, and take for granted of the batch and of all else."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.runtime.batch import split
from ridgeline.runtime.body import LossFunction, StepBody
from ridgeline.runtime.hybrid.guards.guards import Guards
from ridgeline.runtime.hybrid.guards.reading import UnreadableError
from ridgeline.runtime.hybrid.guards.spoken import spoken

MOST_LAYOUTS = 4
"""Memory layouts of batches that are read for one program; batches in further ones run eagerly."""
_BUFFERS = re.compile(r"L\['model'\](\._modules\['\w+'\])*\._buffers$")


def loss_program(loss_fn: LossFunction, model: nn.Module, batch: Any) -> Tensor:
    """The program that is read."""
    return loss_fn(model, batch)


def cast_loss_program(loss_fn: LossFunction, model: nn.Module, batch: Any, kind: str) -> Tensor:
    """The same in bf16, as `StepBody` calls it."""
    with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
        return loss_fn(model, batch)


def read_captured(body: StepBody, batch: Any, kind: str, notes: list[str]) -> "StepReads | None":
    """The guards of a captured step; None where nobody can read it, which is noted."""
    try:
        return StepReads(body, batch, kind, is_lifted=False)
    except UnreadableError as error:
        note = (
            f"only changes of modules and flags are noticed, not all that its code reads: {error}"
        )
        if note not in notes:
            notes.append(note)
        return None


class StepReads:
    """The guards of a step, but for those of its optimizer.

    Args:
        body: The step.
        batch: An example, as the step was traced or captured with.
        kind: The device's type.
        is_lifted: The program's state follows the model's tensors to wherever they lie.

    Raises:
        UnreadableError: torch's compiler cannot read the step in one piece.

    Cost: Tenths of a second to a few seconds.
    """

    def __init__(self, body: StepBody, batch: Any, kind: str, *, is_lifted: bool) -> None:
        self._arguments: dict[str, Any] = {"loss_fn": body.loss_fn, "model": body.model}
        self._program: Any = loss_program
        if body.plan.precision == "bf16":
            self._arguments["kind"] = kind
            self._program = cast_loss_program
        self._accumulate = body.plan.accumulate
        self._is_lifted = is_lifted
        self._example = batch
        self._readings = body.readings
        self._guards = [self._known(batch) or self._read(batch)]

    def check_writes(self) -> None:
        """Refuse a step that changes more than the values of tensors and the model's buffers.

        Raises:
            CaptureError: names what it changes.
        """
        written = [w for w in self._guards[0].writes if not _BUFFERS.match(w.what)]
        if written:
            listed = ", ".join(f"{spoken(w.what)} (a {w.kind})" for w in written)
            raise CaptureError(
                f"wanted a step that changes tensors only, got one that changes {listed}, which one program "
                "would never do again; do it after each training step, or use execution='compiled' or "
                "'eager'"
            )

    def fit(self, batch: Any) -> bool:
        """Whether the program computes the step of this batch.

        Cost: 0.03 us a guard: a few microseconds for a small network, 0.1 ms for a large one. A batch that
            lies otherwise in memory than those before is read once.
        """
        arguments = self._with(batch)
        if any(guards.holds(arguments) for guards in self._guards):
            return True
        if self.broken() is not None or len(self._guards) >= MOST_LAYOUTS:
            return False
        guards = self._read(batch)
        self._guards.append(guards)
        return guards.graph == self._guards[0].graph

    def broken(self) -> str | None:
        """What is not as it was, whatever the batch; None while nothing is."""
        arguments = self._with(self._example)
        if self._guards[0].holds(arguments):
            return None
        return spoken(self._guards[0].difference(arguments))

    def _known(self, batch: Any) -> Guards | None:
        """Guards that were read for another plan of the same step, where they hold now."""
        arguments = self._with(batch)
        marks = (self._program, self._is_lifted)
        found = (guards for known, guards in self._readings if known == marks)
        return next((guards for guards in found if guards.holds(arguments)), None)

    def _read(self, batch: Any) -> Guards:
        model = self._arguments["model"]
        followed = [*model.parameters(), *model.buffers()] if self._is_lifted else []
        guards = Guards(self._program, self._with(batch), ["batch"], followed)
        self._readings.append(((self._program, self._is_lifted), guards))
        return guards

    def _with(self, batch: Any) -> dict[str, Any]:
        if self._accumulate > 1:
            batch = split(batch, self._accumulate)[0][0]
        return {**self._arguments, "batch": batch}
