"""The body of a training step: forward, backward, synchronisation, optimizer, in one function.

The same body runs eagerly and inside a captured graph, so every execution mode does the same maths.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ridgeline.capture.casts import autocast_of
from ridgeline.capture.unchecked import unchecked
from ridgeline.errors import WorkloadError
from ridgeline.execution import MODES, is_compiled_in_parts
from ridgeline.model_graphs.step_forms import make_form
from ridgeline.optimizer_forms import (
    begins_with_gradients,
    calls_model,
    differentiates_gradients,
    sparse_modules,
)
from ridgeline.optimizers.capturable import give_up_fused, make_fused
from ridgeline.optimizers.groups import parameters_of
from ridgeline.optimizers.optimizer_calls import (
    clear_gradients,
    clear_others,
    update,
    update_in_order,
)
from ridgeline.plan import Plan, Precision
from ridgeline.programs.compiling import CompiledForms, Form, LossFunction, StepFindings
from ridgeline.reach.loss import EarlierGraphs, have_gradients, scalar_loss, start_backward
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.layout.ownership import clip_gradients
from ridgeline.runtime.steps.body.clipped import ClippedParameters
from ridgeline.runtime.steps.body.requirements import (
    check_differentiable,
    check_gradients,
    check_second_order,
)
from ridgeline.runtime.steps.body.tf32 import without_tf32
from ridgeline.runtime.sync.synchronizer import Synchronizer
from ridgeline.synchronisation import COMPRESSIONS
from ridgeline.tensors.batch import split, to_device
from ridgeline.tensors.memory_format import ChannelsLast

_NOTHING = contextlib.nullcontext()


class StepBody:
    """Everything between a batch on the device and updated parameters.

    Args:
        model: Trained in place.
        loss_fn: `loss_fn(model, batch)` gives the mean loss as a scalar tensor.
        optimizer: Any torch optimizer over the model's parameters.
        plan: Its form of execution, precision and accumulation are used here.
        synchronizer: Makes the workers' gradients one; None for a worker alone.
        clip_norm: Total norm that gradients are clipped to, or None.
        device: Where the model is.
        notes: Receives what was done to the program.
        forms: What other steps with this model and loss function have compiled; None compiles again.
        parted: Groups of workers among which parameters are split; see `layout.ownership`.
        channels_last: Lays batches out as the plan has them; None leaves them.
        is_undone: Whether all steps are undone, as those of a trial.

    Attributes:
        form: How the loss is computed: as written, compiled whole, or by region.
        findings: What was found out of this step under this plan or others.
        overhead_ns: Host time of the last step that a plain loop would not have spent.

    Raises:
        CaptureError: the plan compiles by region and the model repeats no block, or its form has no gradients
            of gradients and the code asks for some.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: Optimizer,
        plan: Plan,
        synchronizer: Synchronizer | None,
        *,
        clip_norm: float | None,
        device: torch.device,
        notes: list[str] | None = None,
        forms: CompiledForms | None = None,
        parted: Sequence[ProcessGroup] = (),
        channels_last: ChannelsLast | None = None,
        is_undone: bool = False,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.synchronizer = synchronizer
        self.overhead_ns = 0
        self.plan = plan
        self.clip_norm = clip_norm
        self.is_undone = is_undone
        self._parted = tuple(parted)
        self._clipped = ClippedParameters(model)
        self._plain = Form(loss_fn)
        self._notes = [] if notes is None else notes
        mode = MODES[plan.execution]
        check_differentiable(model, loss_fn, plan)
        self._keeps_graph = differentiates_gradients(optimizer)
        if self._keeps_graph:
            check_second_order(
                optimizer, plan, num_workers=1 if synchronizer is None else plan.workers
            )
        is_replayed = mode.is_replayed_on(device.type)
        # Parts hand out gradients earlier; a worker alone sends none, and would only pay for the calls.
        is_cut = synchronizer is not None and is_compiled_in_parts(plan, device.type)
        self._checks_values = mode.checks_values_on(device.type)
        has_rows = synchronizer is not None and device.type == "cuda" and sparse_modules(model)
        # Only several workers must stay equal to the bit, and kernels in a fixed order are slower.
        self._update = update_in_order if has_rows else update
        with unchecked():  # torch's compiler switches the checks off for good
            self.form = make_form(
                mode.form,
                loss_fn,
                model,
                notes=self._notes,
                is_replayed=is_replayed,
                replays_model=mode.replays_model,
                announces=synchronizer is not None,
                combines=plan.kernels == "combined",
                owns_random=plan.random == "compiled",
                bucket_bytes=plan.sync.bucket_bytes if is_cut else (),
                forms=forms,
            )
        # What was read holds a batch: a step that takes nothing for granted does not keep it.
        shares = mode.is_captured or mode.is_one_program or is_undone
        self.findings = forms.findings if forms is not None and shares else StepFindings()
        self._autocast = plan.precision
        self._device = device
        self._channels_last = channels_last
        self._is_checked = False
        self._is_repeated = is_undone
        self._has_looked_back = False
        self._has_own_backward: bool | None = None
        self._calls_model = calls_model(optimizer)
        self._num_groups = len(optimizer.param_groups)
        self._sent_with_losses = _sent_with_losses(model, plan, synchronizer)

    def placed(self, batch: Any) -> Any:
        """The batch on the device and in the plan's memory format; itself where it is both.

        Cost: See `to_device`; 5 us and more where the plan has a memory format.
        """
        batch = to_device(batch, self._device)
        return batch if self._channels_last is None else self._channels_last.batch(batch)

    def __call__(self, batch: Any, recorder: Recorder) -> Tensor:
        """Run one step; the mean loss over the batch, detached.

        Raises:
            WorkloadError: the loss is not a scalar tensor that depends on the parameters.
        """
        if self._calls_model:
            return self._called_back(batch, recorder)
        if len(self.optimizer.param_groups) != self._num_groups:
            self._take_groups()
        loss = self._checked_gradients(batch, recorder)
        self._update(self.optimizer)
        self.updated()
        return loss

    def _take_groups(self) -> None:
        """A script has added some: they are fused with the others, as where the step is made again."""
        self._num_groups = len(self.optimizer.param_groups)
        if self.plan.optimizer == "fused" and not MODES[self.plan.execution].is_replayed:
            self._notes.extend(make_fused(self.optimizer, self._device))

    def updated(self) -> None:
        """The optimizer has updated the parameters: other workers may have to know."""
        if self.synchronizer is not None:
            self.synchronizer.after_step()

    def _called_back(self, batch: Any, recorder: Recorder) -> Tensor:
        """A step whose optimizer has gradients computed as often as it wants; the loss of the first time.

        The frames are those of the first time: the others count as the optimizer's.
        """
        losses: list[Tensor] = []

        def closure() -> Tensor:
            # `step()` runs under no_grad, and not every optimizer lifts that for its closure.
            with torch.enable_grad():
                told = Recorder(HostClock(), starts=False) if losses else recorder
                losses.append(self._checked_gradients(batch, told))
            return losses[-1]

        if begins_with_gradients(self.optimizer):
            closure()
        # The closure may have run already: what counts is whether the step itself calls it.
        num_before = len(losses)
        self.optimizer.step(closure)  # type: ignore[arg-type] - torch means a number or a tensor
        if len(losses) == num_before:
            raise WorkloadError(
                f"wanted an optimizer that calls the loss in each step, got {type(self.optimizer).__name__} "
                "that did not; call closure() in its step"
            )
        self.updated()
        return losses[0]

    def _checked_gradients(self, batch: Any, recorder: Recorder) -> Tensor:
        loss = self.gradients(batch, recorder)
        if not self._is_checked:
            # Once: the first backward pass tells which parameters get gradients, and asking costs time.
            check_gradients(self.model, self.optimizer)
            if self.plan.optimizer == "fused":  # and which of these are sparse
                found = give_up_fused(self.optimizer)
                self._notes.extend(note for note in found if note not in self._notes)
            self._is_checked = True
        return loss

    def gradients(self, batch: Any, recorder: Recorder) -> Tensor:
        """All of a step but the optimizer's: averaged and clipped gradients, and the mean loss, detached.

        Raises:
            WorkloadError: the loss is not a scalar tensor that depends on the parameters.
            SideEffectError: it is to be run again, and goes back through what was computed before it.
        """
        with self.form.active():
            if self._checks_values:
                return self._gradients(batch, recorder)
            with unchecked():
                return self._gradients(batch, recorder)

    @contextlib.contextmanager
    def as_written(self, *, precision: Precision | None = None) -> Iterator[None]:
        """Steps inside run the user's code operator by operator: the reference for every other form.

        They leave out the checks that the plan leaves out, and notes say so.

        Args:
            precision: Instead of the plan's, e.g. `as-is` to see what the plan's precision changes.
        """
        form, name, is_repeated = self.form, self._autocast, self._is_repeated
        self.form, self._is_repeated = self._plain, True
        self._autocast = precision or name
        checks = _NOTHING if self._checks_values else unchecked(self._notes)
        # That precision is no cast of this step's, but a setting of the process.
        is_exact = precision == "as-is" and self.plan.precision == "tf32"
        try:
            with checks, without_tf32() if is_exact else _NOTHING:
                yield
        finally:
            self.form, self._autocast, self._is_repeated = form, name, is_repeated

    def _gradients(self, batch: Any, recorder: Recorder) -> Tensor:
        with _NOTHING if self.synchronizer is None else self.synchronizer.clearing():
            clear_gradients(self.optimizer)
            if self._sent_with_losses:
                clear_others(self._sent_with_losses, self.optimizer)
        begin = time.perf_counter_ns()
        parts = split(batch, self.plan.accumulate)
        earlier = self._earlier(batch)
        total: Tensor | None = None
        self.overhead_ns = time.perf_counter_ns() - begin
        # Not armed: these gradients add up on the worker, and only the last backward pass sends them.
        for index, (part, share) in enumerate(parts[:-1]):
            recorder.mark(f"micro/{index}")
            loss = self._weighted_loss(part, share, earlier)
            self._backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        recorder.mark("forward")
        loss = self._weighted_loss(*parts[-1], earlier)
        if self.synchronizer is None:
            recorder.mark("backward")
            self._backward(loss)
        else:
            # Before it is armed: a refusal must leave no hooks that wait for gradients.
            self.synchronizer.check_covers(self.optimizer.param_groups)
            self.synchronizer.arm(recorder)
            self._backward(loss)
            self.synchronizer.finish()
            self.overhead_ns += self.synchronizer.overhead_ns
        recorder.mark("optimizer")
        # After `finish`: the norm is that of the mean over all workers, as one worker would have it.
        if self.clip_norm is not None:
            clip_gradients(self._clipped.of(self.optimizer), self.clip_norm, self._parted)
        detached = loss.detach()
        return detached if total is None else total + detached

    def _earlier(self, batch: Any) -> EarlierGraphs | None:
        """What a step that will be run again must not go back through; None where that is known."""
        if not self._is_repeated or self._has_looked_back:
            return None
        self._has_looked_back = True
        return EarlierGraphs(self.model, self.loss_fn, self.optimizer, batch)

    def _weighted_loss(self, part: Any, share: float, earlier: EarlierGraphs | None) -> Tensor:
        with autocast_of(self._autocast, self._device.type):
            loss = self.form(self.model, part)
        if self._has_own_backward is None:  # once, as its gradients were cleared before
            held = parameters_of(self.optimizer)
            self._has_own_backward = have_gradients(held)
        loss = scalar_loss(loss, has_gradients=self._has_own_backward)
        if earlier is not None:
            earlier.refuse_in(loss)
        # Not multiplied by 1, which would be one more kernel in every step that accumulates nothing.
        return loss if share == 1.0 else loss * share

    def _backward(self, loss: Tensor) -> None:
        start_backward(
            loss, has_gradients=bool(self._has_own_backward), keeps_graph=self._keeps_graph
        )


def _sent_with_losses(
    model: nn.Module, plan: Plan, synchronizer: Synchronizer | None
) -> tuple[nn.Parameter, ...]:
    """All parameters where a codec shares their gradients out; none where they are sent as they are.

    Those that nobody clears grow from step to step. Sent beside others, they would take the places of the
    largest, and the range of a block's scale.
    """
    has_codec = synchronizer is not None and COMPRESSIONS[plan.sync.compression].codec
    return tuple(model.parameters()) if has_codec else ()
