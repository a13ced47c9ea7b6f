"""What model and loss function of a traced step read, and take for granted of the batch and of all else."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.guards.guards import Guards
from ridgeline.guards.layouts import LayoutReads
from ridgeline.guards.lenient import host_draws_read
from ridgeline.guards.reading import UnreadableError, Write
from ridgeline.reach.reach import Reach
from ridgeline.runtime.steps.body.body import LossFunction, StepBody
from ridgeline.tensors.batch import split

_BUFFERS = re.compile(r"L\['model'\](\._modules\['\w+'\])*\.(?:_buffers|__dict__\['_buffers'\])$")
_BATCH = "L['batch']"
_AFTERWARDS = "do it after each training step, or use"


def loss_program(loss_fn: LossFunction, model: nn.Module, batch: Any) -> Tensor:
    """The program that is read."""
    return loss_fn(model, batch)


def cast_loss_program(loss_fn: LossFunction, model: nn.Module, batch: Any, kind: str) -> Tensor:
    """The same in bf16, as `StepBody` calls it."""
    with torch.autocast(kind, torch.bfloat16):
        return loss_fn(model, batch)


class StepReads(LayoutReads):
    """The guards of a step, but for those of its optimizer.

    Args:
        body: The step.
        batch: An example, as the step was traced or captured with.
        kind: The device's type.
        is_lifted: The program's state follows the model's tensors to wherever they lie.
        has_idle_draws: Random numbers that it draws on the host are known to decide nothing.

    Raises:
        UnreadableError: torch's compiler cannot read the step in one piece.

    Cost: Tenths of a second to a few seconds.
    """

    def __init__(
        self,
        body: StepBody,
        batch: Any,
        kind: str,
        *,
        is_lifted: bool,
        has_idle_draws: bool = False,
    ) -> None:
        self._draws = host_draws_read if has_idle_draws else contextlib.nullcontext
        fixed: dict[str, Any] = {"loss_fn": body.loss_fn, "model": body.model}
        program: Any = loss_program
        if body.plan.precision == "bf16":
            fixed["kind"] = kind
            program = cast_loss_program
        self._accumulate = body.plan.accumulate
        self._readings = body.findings.readings
        self._marks = (program, is_lifted, has_idle_draws)
        followed = [*body.model.parameters(), *body.model.buffers()] if is_lifted else []
        super().__init__(program, fixed, self._brought(batch), followed)

    def check_writes(self) -> None:
        """Refuse a step that counts in Python, or writes where a trace would not see it.

        What else it writes, a trace has to show to be tensors.

        Raises:
            CaptureError: names all that it changes in Python.
        """
        written = self._written()
        if not written:
            return
        reach = Reach(*self._fixed.values())
        seen = {*map(id, reach.stores), *(id(cell.owner) for cell in reach.cells)}
        if any(write.gets_constant or not seen & self._places(write) for write in written):
            self.refuse_writes()

    def refuse_writes(self) -> None:
        """Refuse a step that changes more than the values of tensors and the model's buffers.

        Raises:
            CaptureError: names what it changes.
        """
        self._refuse(self._written(), _AFTERWARDS)

    def _written(self) -> list[Write]:
        return [w for w in self.guards[0].writes if not _BUFFERS.match(w.what)]

    def _places(self, write: Write) -> set[int]:
        """Numbers of what holds a thing that is written: the container, or an object and its attributes."""
        # What is written, or what has it as an attribute.
        texts = (write.what, write.what.rpartition(".")[0])
        found = (self.guards[0].found(text, self._captured) for text in texts)
        holders = [one for one in found if type(one).__name__ == write.kind]
        return {*map(id, holders), *(id(vars(one)) for one in holders if hasattr(one, "__dict__"))}

    def check_batch_kept(self) -> None:
        """Refuse a step that puts something into its batch, or takes something from it.

        Raises:
            CaptureError: names what it changes.
        """
        self._refuse([w for w in self.guards[0].writes if w.what.startswith(_BATCH)], _AFTERWARDS)

    def serves(self, batch: Any) -> bool:
        """Whether the program computes the step of this batch, see `fit`."""
        return self.fit(self._brought(batch))

    @property
    def text(self) -> str:
        """What was read, the same in every process: operators, code and writes."""
        return self.guards[0].text

    @property
    def takes_host(self) -> bool:
        """Whether it takes tensors that lie on the host, and does not make all of those itself."""
        return self.guards[0].takes_host

    def is_still_read(self, batch: Any) -> bool:
        """Whether its code would be read alike for this batch, wherever tensors lie by now."""
        arguments = {**self._fixed, **self._brought(batch)}
        return self._holding(self.guards, arguments) is not None

    def _read(self, brought: Mapping[str, Any]) -> Guards:
        """Guards that were read for another plan of the same step, where they hold now; or new ones."""
        if self.carried():  # guards without the places of some tensors, which are no other plan's
            with self._draws():
                return super()._read(brought)
        alike = [guards for marks, guards in self._readings if marks == self._marks]
        known = self._holding(alike, {**self._fixed, **brought})
        if known is None:
            with self._draws():
                known = super()._read(brought)
            self._readings.append((self._marks, known))
        return known

    def _holding(self, known: Sequence[Guards], arguments: Mapping[str, Any]) -> Guards | None:
        """Guards that hold for these arguments, those that report tensors that were moved made again."""
        held = next((guards for guards in known if guards.holds({**arguments})), None)
        moved = (guards.moved(arguments, self._followed) for guards in known)
        return held or next((guards for guards in moved if guards is not None), None)

    def _brought(self, batch: Any) -> dict[str, Any]:
        # All parts run the same code, so the first is read for the others.
        return {"batch": split(batch, self._accumulate)[0][0] if self._accumulate > 1 else batch}

    def _refuse(self, written: Sequence[Write], advice: str) -> None:
        if written:
            listed = ", ".join(f"{self._spoken(w.what)} (a {w.kind})" for w in written)
            raise CaptureError(
                f"wanted a step that changes tensors only, got one that changes {listed}, which one program "
                f"would never do again; {advice} execution='compiled' or 'eager'"
            )


def read_step(body: StepBody, batch: Any, kind: str) -> StepReads:
    """What a step that becomes one program reads; see `StepReads`.

    Raises:
        UnreadableError: torch's compiler cannot read it in one piece; says how it can be run.
    """
    with contextlib.suppress(UnreadableError):
        return StepReads(body, batch, kind, is_lifted=True)
    # It may branch on random numbers that decide nothing. The trace refuses those that decide.
    try:
        return StepReads(body, batch, kind, is_lifted=True, has_idle_draws=True)
    except UnreadableError as error:
        instead = "use execution='compiled', which leaves that to Python, or 'eager'"
        raise UnreadableError(f"{error}; {instead}") from error
