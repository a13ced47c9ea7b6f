"""`PlannedStep` for a given plan: one call, one training step.

Choosing a plan needs the machine and the workload; that is joined in `ridgeline.session`, whose
`PlannedStep` (the public one) builds on this one.
"""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ridgeline.closing import Closing
from ridgeline.errors import PlanError
from ridgeline.execution import MODES, check_alone
from ridgeline.history import Outage
from ridgeline.optimizers.capturable import make_fused
from ridgeline.optimizers.given import check_parts, check_shaped
from ridgeline.optimizers.step_alone import StepAlone, allow_alone
from ridgeline.optimizers.step_hooks import step_hooks, tell_schedulers
from ridgeline.plan import Plan
from ridgeline.programs.compiling import CompiledForms
from ridgeline.recording.clocks import DeviceClock, HostClock
from ridgeline.recording.gaps import TALLY
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.layout.apply import apply_layout
from ridgeline.runtime.layout.ownership import parted_groups
from ridgeline.runtime.steps.body import requirements
from ridgeline.runtime.steps.body.body import LossFunction, StepBody
from ridgeline.runtime.steps.body.tf32 import allowing_tf32
from ridgeline.runtime.steps.runners import make_runner
from ridgeline.runtime.sync.joining import StateWatch, join_others
from ridgeline.runtime.sync.local.local_steps import LocalSteps
from ridgeline.runtime.sync.synchronizer import Synchronizer
from ridgeline.synchronisation import replaces_update, shards_update
from ridgeline.tensors.memory_format import ChannelsLast
from ridgeline.timeline import Timeline
from ridgeline.workers import attendance
from ridgeline.workers.host_threads import ThreadsKept
from ridgeline.workers.same_plan import check_same_plan
from ridgeline.workers.world import World

WARMUP_STEPS = 3
"""First steps kept out of the timeline: allocations, algorithm choice, the second cut of buckets."""

CLOSED = "wanted an open step, got one that was closed; make a new TrainStep to train on"


class PlannedStep(Closing):
    """One training step of `model` under a plan: `loss = step(batch)`.

    Under `torchrun` every worker runs the same script; the step joins the process group, takes worker
    0's initial parameters and buffers, and averages gradients. With a mesh or a process group those in it do
    so among themselves, whatever the others train. Alone it trains on one device. The model
    is moved to the worker's device; the optimizer must have been made from its parameters before.

    Args:
        model: The model; changed in place.
        loss_fn: `loss_fn(model, batch)` returns the mean loss as a scalar tensor.
        optimizer: Any torch optimizer.
        plan: A `Plan`, or the path of a saved one.
        clip_norm: Clip the (averaged) gradients to this total norm, above 0; None leaves them.
        device: `cpu` or `cuda`, with this worker's own number or none; None takes the GPU where there is one.
        order: Expected gradient-ready order, e.g. `workload.ready_order`; measured anyway.
        world: This worker's place, if not that of the environment: a world of one trains alone even
            inside a process group.
        name: Title of timelines.
        forms: What other steps with this model and loss function have compiled; None compiles again.
        mesh: Train over its data axis only; see `given_group`.
        process_group: Train over its workers only; not with a mesh or a world.
        is_undone: All steps are undone, as those of a trial: what is compiled is then checked with its
            capture, and runs in a child process first where it may cost the process its device.

    Attributes:
        plan: The plan in force.
        world: This worker's place.
        recorder: The spans of the last steps.
        notes: What could not be done as planned, each with its reason.
        synchronizer: What makes the workers' gradients one; its state belongs into checkpoints. None for a
            worker alone.
        outages: Reports when this worker did not hear of a server that it trains through; None: it has none.

    Raises:
        PlanError: the plan asks for what this release or this world does not offer, `clip_norm` is no
            finite number above 0, or the mesh or group cannot be trained over.
        WorkloadError: there are several workers, and the optimizer has parameters that are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: Optimizer,
        plan: Plan | str | Path,
        *,
        clip_norm: float | None = None,
        device: str | torch.device | None = None,
        order: tuple[str, ...] | None = None,
        world: World | None = None,
        name: str = "step",
        forms: CompiledForms | None = None,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
        is_undone: bool = False,
    ) -> None:
        check_parts(model, loss_fn, optimizer)
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        if world is not None and (mesh is not None or process_group is not None):
            raise PlanError("wanted a world, a mesh or a process group, got two of them; give one")
        self._is_closed = False
        # Where the rest fails, what was begun is ended: the next plan may be tried with the same model.
        with contextlib.ExitStack() as ending:
            # Before a world is joined, which sets the plan's number.
            ending.callback(ThreadsKept(self.plan.threads).close)
            self.world = world or World.join(
                self.plan.threads, device, mesh=mesh, process_group=process_group, model=model
            )
            requirements.check_supported(self.plan, self.world)
            requirements.check_undistributed(model, loss_fn, optimizer, self.world)
            requirements.check_training(optimizer, self.plan, clip_norm)
            check_shaped(model, self.plan.execution)
            # The first exchange: with other plans workers would meet in other collectives and hang.
            check_same_plan(self.plan, self.world, clip_norm=clip_norm)
            self.model = move(model, self.world.device)
            self.optimizer = optimizer
            self._alone = self._forbidden_alone()
            self._step_hooks = step_hooks(optimizer)[0]
            self.name = name
            self.notes: list[str] = []
            self.num_steps = 0
            self._num_warmup: float = WARMUP_STEPS
            self._channels_last: ChannelsLast | None = None
            if self.plan.memory_format == "channels_last":
                self._channels_last = ChannelsLast(self.model, optimizer)
                ending.callback(self._channels_last.close)
            if self.plan.optimizer == "fused" and not MODES[self.plan.execution].is_replayed:
                self.notes.extend(make_fused(optimizer, self.world.device))
            self.recorder = Recorder(DeviceClock() if self.world.kind == "cuda" else HostClock())
            self._attendance = attendance.of(self.world)
            self._enrolled = "" if self._attendance is None else self._attendance.enroll(name)
            apply_layout(self.model, self.plan.layout, self.world)
            self.synchronizer: Synchronizer | None = None
            self._watch: StateWatch | None = None
            self.outages: Callable[[], tuple[Outage, ...]] | None = None
            self._watching_ns = 0
            if self.world.is_among_others:
                self.synchronizer, self._watch, self.outages = join_others(
                    self.plan, self.model, optimizer, self.world, order=order, notes=self.notes
                )
                ending.callback(self.synchronizer.close)
            self._body = self._make_body(loss_fn, clip_norm, forms, is_undone=is_undone)
            if self.plan.precision == "tf32":
                ending.enter_context(allowing_tf32())
            self._runner = make_runner(self._body, self.recorder, self.world, self.notes)
            # Registered last, so first to go: a graph's collectives must not outlive their communicator.
            ending.callback(self._runner.close)
            self._ending = ending.pop_all()

    def __call__(self, batch: Any) -> Tensor:
        """Train on one batch; the mean loss of this worker's batch, detached, 0-d, on the device.

        Raises:
            BatchError: it has fewer samples than `accumulate` wants, or no leading dimension to split.
            CaptureError: the plan captures or compiles, and the step cannot be.
            EquivalenceError: the planned execution gives other results than the eager step.
            WorkloadError: the loss is not a scalar that depends on the parameters, or the workers hold
                different state, since one of them alone loaded or wrote some; see `outside_writes`.
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.
            EngineError: a collective failed otherwise.
            PlanError: the step was closed, or its process group destroyed.

        Cost: Does not synchronise the host with a GPU, once the first calls have compiled, captured and
        checked what the plan says.
        """
        if self._is_closed:
            raise PlanError(CLOSED)
        self.world.check_open()
        called = time.perf_counter_ns()
        if self._step_hooks:
            allow_alone(self.optimizer)
        recorder = self.recorder
        recorder.begin_step(called)
        overhead = 0
        # Runners of graphs do so themselves, and only for batches that are not there already.
        if not self._runner.places:
            batch = self._body.placed(batch)
            overhead = time.perf_counter_ns() - called
        loss = self._runner(batch) if self._watch is None else self._run_among_others(batch)
        begin = time.perf_counter_ns()
        if "step" in vars(self.optimizer):  # put there by schedulers, which count calls of it
            tell_schedulers(self.optimizer)
        if self._alone is not None:
            self._alone.forbid()
        is_warmup = self.num_steps < self._num_warmup
        self.num_steps += 1
        TALLY.stepping_ns += begin - called
        if recorder.end_step(is_warmup=is_warmup):
            overhead += self._body.overhead_ns + recorder.overhead_ns + self._watching_ns
            overhead += time.perf_counter_ns() - begin
            recorder.add_cost("overhead_ns", overhead)
        return loss

    def _run_among_others(self, batch: Any) -> Tensor:
        """The step, where others wait for this worker: they learn what keeps it from coming."""
        present, watch = self._attendance, self._watch
        assert watch is not None
        if present is not None:  # who joined is in no group with others
            present.begin_step(self._enrolled, self.recorder)
        begin = time.perf_counter_ns()
        try:
            watch.before_step()
            spent_ns = time.perf_counter_ns() - begin
            loss = self._runner(batch)
            begin = time.perf_counter_ns()
            watch.after_step()
        except BaseException as error:
            if present is not None:
                present.stopped(error)
            raise
        if present is not None:
            present.end_step(self._enrolled)
        self._watching_ns = spent_ns + time.perf_counter_ns() - begin
        return loss

    def wait(self) -> None:
        """Where the plan holds buckets: update all parameters now; see `synchronisation.holding`.

        Raises:
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.
            EngineError: a collective failed otherwise.
        """
        if self.synchronizer is not None:
            self.synchronizer.wait()

    def begin_warm_up(self) -> None:
        """Keep the coming steps out of the timeline, however many there are."""
        self._num_warmup = math.inf

    def end_warm_up(self) -> None:
        """Have the coming steps in the timeline, the frames of the next one too."""
        self._num_warmup = self.num_steps
        self.recorder.sample_next()

    def hold_exchanges(self) -> None:
        """Where workers train alone: take steps without exchanges until one is let go; see `LocalSteps`."""
        if isinstance(self.synchronizer, LocalSteps):
            self.synchronizer.hold()

    def release_exchange(self) -> float:
        """Let the next step start an exchange, and the others when they are due; the share that it is of.

        A step that exchanges all in any case has nothing to let go.
        """
        if isinstance(self.synchronizer, LocalSteps):
            return self.synchronizer.release()
        return 1.0

    def timeline(self) -> Timeline:
        """The measured timeline of this worker's last steps (median step, all durations).

        Cost: On GPUs, waits for the recorded steps to end.
        """
        return self.recorder.timeline(self.name, self.world.size, self.notes)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's `state_dict()`, whole on the first worker whatever the plan; all workers call this.

        Where each worker keeps the state of its part of the parameters alone, the others get the settings,
        and its tensors are on the CPU. It fits `load_state_dict` of an optimizer on any number of workers.

        Raises:
            PlanError: the step was closed.

        Cost: Waits for the device; for parts, one gathering for each kind of state and bucket.
        """
        if self._is_closed:
            raise PlanError(CLOSED)
        if self.synchronizer is None:
            return self.optimizer.state_dict()
        return self.synchronizer.optimizer_state(self.optimizer)

    def save(self, path: str | Path, batch: Any) -> Path:
        """Write the whole step as a program with its state; `rl.load(path)` continues training elsewhere.

        Args:
            path: The file; must end in `.pt2`.
            batch: An example: the program serves batches of its shape.

        Raises:
            PlanError: there are several workers, or the optimizer has no state yet (run a step first).
            CaptureError: the step cannot be written as one program, or not compiled.
            PackageError: it could not be written.

        Cost: Compiles, seconds to minutes, unless the plan's execution is `packaged`.
        """
        from ridgeline.runtime.steps.whole_step.lifting import state_on
        from ridgeline.runtime.steps.whole_step.program import trace_body
        from ridgeline.runtime.steps.whole_step.runner import StepGraphRunner
        from ridgeline.runtime.steps.whole_step.saved.saving import save_step

        check_alone("packaged", self.world.size)
        batch = self._body.placed(batch)
        if isinstance(self._runner, StepGraphRunner) and self._runner.has_program(batch):
            return self._runner.save(path, batch)
        with state_on(self.optimizer, self.world.device):
            return save_step(path, trace_body(self._body, batch))

    def close(self) -> None:
        """Release hooks, graphs and threads; the model and optimizer stay usable. Safe to call twice.

        Torch computes with as many threads as before the step was made, unless other code set them since, or
        another step that is open.
        """
        if self._attendance is not None and not self._is_closed:
            self._attendance.closed(self._enrolled)
        self._is_closed = True
        allow_alone(self.optimizer)
        # Each of them ends even where another one fails, as a runner does whose device is lost.
        self._ending.close()

    def _forbidden_alone(self) -> StepAlone | None:
        """What forbids steps of the optimizer alone, where a training step leaves no gradients in `.grad`."""
        allow_alone(self.optimizer)  # another step with it may have forbidden them
        plan = self.plan
        if MODES[plan.execution].is_one_program:
            why = f"with execution={plan.execution!r} they stay in the step's one program"
        elif shards_update(plan.sync) or replaces_update(plan.sync):
            why = f"with sync.algorithm={plan.sync.algorithm!r} no worker has all of them after a step"
        else:
            return None
        return StepAlone(self.optimizer, why)

    def _make_body(
        self,
        loss_fn: LossFunction,
        clip_norm: float | None,
        forms: CompiledForms | None,
        *,
        is_undone: bool,
    ) -> StepBody:
        return StepBody(
            self.model,
            loss_fn,
            self.optimizer,
            self.plan,
            self.synchronizer,
            clip_norm=clip_norm,
            device=self.world.device,
            notes=self.notes,
            forms=forms,
            parted=parted_groups(self.world, shards_update=shards_update(self.plan.sync)),
            channels_last=self._channels_last,
            is_undone=is_undone,
        )


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on `device`; in place, so that an optimizer made before keeps its parameters."""
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return model if places <= {device} else model.to(device)
