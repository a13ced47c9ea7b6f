"""`TrainStep`, the public one: measures, traces, chooses and then trains.

The parts live apart (probing, tracing, planning, running); this is where they meet for a user who
has a model, a loss, an optimizer and batches, and wants the loop closed around them.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.decision import neighbours
from ridgeline.decision.choice import PlanChoice
from ridgeline.decision.given import check_choice, given_plan
from ridgeline.decision.heartbeat import to_stderr
from ridgeline.decision.profiling import measured_here, timeline_of
from ridgeline.decision.revisions import Revisions, without_best
from ridgeline.decision.shared_trace import shared_trace
from ridgeline.decision.trial import Script
from ridgeline.errors import CaptureError, EquivalenceError, PlanError, RidgelineError
from ridgeline.given import checked
from ridgeline.machine import Machine
from ridgeline.optimizers.given import check_parts
from ridgeline.plan import Plan
from ridgeline.planner import Ranking
from ridgeline.planner.knobs import NO_PRECISION
from ridgeline.planner.trials.expectation import expected
from ridgeline.programs.compiling import CompiledForms
from ridgeline.reach.side_effects import refuse_streams
from ridgeline.runtime.layout.same_state import check_same_state
from ridgeline.runtime.steps.body import requirements
from ridgeline.runtime.steps.step import CLOSED, PlannedStep, move
from ridgeline.runtime.steps.worker_state import HasWorkerState
from ridgeline.tensors.batch import rebuilt
from ridgeline.timeline import Timeline
from ridgeline.tracing.capture import trace
from ridgeline.verdict import Verdict, verify
from ridgeline.workers import attendance
from ridgeline.workers.rendezvous import rendezvous
from ridgeline.workers.roll_call import SAME_STEPS
from ridgeline.workers.world import World
from ridgeline.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from ridgeline.runtime.steps.body.body import LossFunction


_NONE_YET = object()
"""Stands for the batch that has not come yet."""


class TrainStep(HasWorkerState):
    """One training step, as fast as the machine allows: `loss = step(batch)`.

    With `plan="auto"` the first batch starts the loop: the machine is measured (or its saved profile used),
    the step is traced without running it, plans are ranked by simulation, the best few are tried for real,
    and the winner runs. Model, optimizer and random state are put back after the trials, so the choice leaves
    no trace in the maths. The same script runs alone, under `torchrun`, and on several machines.

    Args:
        model: Trained in place; moved to the worker's device.
        loss_fn: `loss_fn(model, batch)` returns the mean loss of the batch as a scalar tensor; a batch is
            any nest of tuples, lists and dicts of tensors.
        optimizer: Made from the model's parameters.
        plan: `"auto"`, a `Plan`, or the path of a saved one.
        clip_norm: Clip the averaged gradients to this total norm, above 0; None leaves them.
        allow: Changes of the maths that `"auto"` may make, e.g. `("bf16",)`; none by default.
        machine: Use this profile instead of measuring.
        device: `cpu` or `cuda`, with this worker's own number or none; None takes the GPU where there is one.
        steps: Steps that will be trained, if known: `"auto"` then weighs the seconds of compiling against
            what they gain over all steps. Unknown, and without `seconds`, a CPU trains without a compiler
            for as long as compiling takes; then what compiles is tried, and the faster plan continues.
        seconds: That `"auto"` may take to choose, from the first batch on; what is under way then is stopped,
            but for a call into a library (a backward pass, say), which ends first. With very few the step
            runs as it was written. None: as `steps` allow, or, where those are unknown, half as long again
            as compiling the step once.
        progress: Takes a line about each part of the choice; None writes them to stderr, on rank 0.
        name: Title in reports.
        mesh: Train over this mesh of one axis, or over its axis `data`, and not over all of the job.
        process_group: Train over its workers only, which alone make this step; not with a mesh.

    Raises:
        PlanError: a given plan asks for what this release or this world does not offer, or there is none;
            `clip_norm` is no finite number above 0; or the mesh or the group cannot be trained over.

    Example:
        >>> step = rl.TrainStep(model, loss_fn, optimizer)  # doctest: +SKIP
        >>> for batch in rl.feed(loader, step.device):  # doctest: +SKIP
        ...     loss = step(batch)
    """

    @checked(PlanError, but=("plan", "clip_norm", "allow", "steps", "seconds"))
    def __init__(
        self,
        model: "nn.Module",
        loss_fn: "LossFunction",
        optimizer: "Optimizer",
        plan: Plan | str | Path = "auto",
        *,
        clip_norm: float | None = None,
        allow: Collection[str] = (),
        machine: Machine | None = None,
        device: "str | torch.device | None" = None,
        steps: int | None = None,
        seconds: float | None = None,
        progress: Callable[[str], None] | None = None,
        name: str = "step",
        mesh: "DeviceMesh | None" = None,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        check_parts(model, loss_fn, optimizer)
        check_choice(clip_norm, allow, steps, seconds)
        self.world = World.join(0, device, mesh=mesh, process_group=process_group, model=model)
        attendance.of(self.world)  # a worker that waits for this one learns that it is there
        requirements.check_undistributed(model, loss_fn, optimizer, self.world)
        self.model = move(model, self.world.device)
        self.loss_fn, self.optimizer = loss_fn, optimizer
        neighbours.join(self)
        self.machine = machine
        self.workload: Workload | None = None
        self.ranking: Ranking | None = None
        self.name = name
        self._clip_norm, self._num_steps, self._allow = clip_norm, steps, tuple(allow)
        self._example: Any = _NONE_YET  # a batch may be None
        self._step: PlannedStep | None = None
        self._revisions: Revisions | None = None
        self._is_closed, self._seconds = False, seconds
        self._forms = CompiledForms()
        self._say = progress or to_stderr
        if plan == "auto":
            requirements.check_joins(plan, self.world)
        self._step = None if plan == "auto" else self._planned(given_plan(plan))

    @property
    def device(self) -> Any:
        """The torch device that this worker trains on."""
        return self.world.device

    @property
    def plan(self) -> Plan:
        """The plan in force.

        Raises:
            PlanError: it is `"auto"` and no batch has been seen yet.
        """
        return self._ready().plan

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be done as planned, and what was changed to do it."""
        return tuple(self._ready().notes)

    def __call__(self, batch: Any) -> "Tensor":
        """Train on one batch; the mean loss of this worker's batch, detached and 0-d.

        Raises:
            WorkloadError: the loss is not a scalar that depends on the parameters, or several workers hold
                different state, since one of them alone loaded a checkpoint or wrote into the model.
            BatchError: the batch does not fit the step.
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.
            EngineError: a collective failed otherwise.
            PlanError: the step was closed, or its process group destroyed.

        Cost: Does not wait for a GPU. With `plan="auto"` the first call measures and tries plans, which
        takes seconds to minutes; call `prepare(batch)` to do that ahead.
        """
        if self._step is None:
            self.prepare(batch)
        if self._example is _NONE_YET:
            self._example = rebuilt(batch)
        if self._revisions is not None:
            self._revise(self._revisions, batch)
        try:
            return (self._step or self._ready())(batch)
        except (CaptureError, EquivalenceError) as error:  # then nothing was trained on the batch
            if not self._takes_next_best(error):
                raise
        return self(batch)

    def prepare(self, batch: Any) -> Plan:
        """Measure, trace and choose for batches like this one, without training on it.

        Under several workers all must call it with batches of the same shape; all take the choice that
        worker 0's measurements lead to.

        Raises:
            PlanError: the step was closed, or its process group destroyed.
        """
        if self._is_closed:
            raise PlanError(CLOSED)
        self.world.check_open()
        self._example = rebuilt(batch)
        if self._step is None:
            with rendezvous("the choice of a plan", SAME_STEPS, self.world):
                # Parameters and buffers will be rank 0's; the optimizer's state is not sent.
                check_same_state(None, self.optimizer, self.world, when="before a plan is chosen")
                choice = self._choose()
            self._take_best(choice.notes)
            if self.ranking is not None:
                self._revisions = Revisions(choice, self.ranking)
        return self._ready().plan

    def wait(self) -> None:
        """Update all parameters whose update is due.

        Only a plan that holds buckets (`sync.options["held"]`) leaves any; else, and before the first batch,
        nothing happens. Whoever reads a parameter or the optimizer's state does so without calling this.

        Raises:
            AbsentWorkerError, EngineError: a collective failed; see `__call__`.

        Cost: Blocks for what is left of the exchanges, which nothing hides then; the updates on a CPU.
        """
        if self._step is not None:
            self._step.wait()

    def timeline(self) -> Timeline:
        """The measured timeline of this worker's last steps."""
        return self._ready().timeline()

    def predicted(self) -> Timeline:
        """What the simulator says of the plan in force, before any trial.

        Cost: Measures and traces, if that has not happened yet. All workers have to call this then; one
            that is alone gets an AbsentWorkerError.
        """
        plan = self._ready().plan
        if self.ranking is not None:
            return self.ranking.best.timeline
        with self._together("step.predicted()"):
            workload = self._describe()
            self.machine = self.machine or measured_here(workload, plan, self.world)
        return timeline_of(self.machine, workload, plan, self.world)

    def expected(self) -> Timeline:
        """What was expected when training began: the prediction, corrected by the plan's trial."""
        trial = None if self.ranking is None else self.ranking.best.measured
        return expected(self.predicted(), trial)

    def verdict(self) -> Verdict:
        """What was expected when training began, and before any trial, against what happened.

        Cost: See `predicted`; traces the step for the causes.
        """
        with self._together("step.verdict()"):
            workload, predicted, expected = self._describe(), self.predicted(), self.expected()
        machine, measured = self.machine, self.timeline()
        return verify(predicted, measured, expected=expected, machine=machine, workload=workload)

    def _together(self, call: str) -> contextlib.AbstractContextManager[None]:
        """All workers are in a call, where something is left to trace or to measure."""
        is_predicted = self.machine is not None or self.ranking is not None
        if self.workload is not None and is_predicted:
            return contextlib.nullcontext()
        advice = f"call {call} on all workers, and print what it gives on one"
        return rendezvous(call, advice, self._ready().world)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's `state_dict()`, whole on the first worker whatever the plan; all must call this."""
        return self._ready().optimizer_state()

    def save(self, path: str | Path) -> Path:
        """Write the whole training step as one program with its state, for batches like those seen.

        `rl.load(path)` runs it in a process without the model's source, and continues training with the same
        losses. A package holds native code: load only what comes from someone you trust.

        Args:
            path: The file; must end in `.pt2`.

        Raises:
            PlanError: no step ran yet, or there are several workers.
            CaptureError: the step cannot be written as one program, or not compiled.
            PackageError: it could not be written.

        Cost: Compiles, seconds to minutes, unless the plan's execution is `packaged`.
        """
        if self._example is _NONE_YET:
            raise PlanError(
                "wanted a step that has run, got one that has seen no batch yet; train a step, then save"
            )
        return self._ready().save(path, self._example)

    def close(self) -> None:
        """Release hooks, graphs and threads; model and optimizer stay usable, and so do the reports."""
        self._is_closed = True
        if self._step is not None:
            self._step.close()

    def _ready(self) -> PlannedStep:
        if self._step is None:
            raise PlanError(
                "wanted a plan in force, got a step that has seen no batch yet; call step(batch) or "
                "step.prepare(batch) first"
            )
        return self._step

    def _planned(self, plan: Plan, *, is_undone: bool = False) -> PlannedStep:
        return PlannedStep(
            self.model,
            self.loss_fn,
            self.optimizer,
            plan,
            clip_norm=self._clip_norm,
            device=self.world.device.type,
            process_group=self.world.process_group,
            order=self.workload.ready_order if self.workload else None,
            name=self.name,
            forms=self._forms,
            is_undone=is_undone,
        )

    def _describe(self, check: Callable[[bool], None] = lambda is_variant: None) -> Workload:
        """Trace, once; all workers take worker 0's trace.

        Args:
            check: See `trace`; where it ends the trace of one worker, it ends that of all.
        """
        if self._example is _NONE_YET:
            raise PlanError(
                "wanted an example batch to trace, got none yet; call step(batch) or step.prepare(batch) "
                "first"
            )
        if self.workload is None:
            self.workload = shared_trace(lambda: self._traced(check), self.world)
        return self.workload

    def _traced(self, check: Callable[[bool], None]) -> Workload:
        refuse_streams(self.model, self.loss_fn, self.optimizer, self._example)
        own = () if self._step is None else (self._step.plan.precision,)
        allowed = [name for name in self._allow if name not in NO_PRECISION]
        return trace(
            self.model,
            self.loss_fn,
            self.optimizer,
            rebuilt(self._example),
            name=self.name,
            precisions=tuple(dict.fromkeys((*allowed, *own))),
            memory_formats=("channels_last",),
            may_run=True,
            check=check,
            clip_norm=self._clip_norm,
        )

    def _revise(self, revisions: Revisions, batch: Any) -> None:
        """Continue with another plan where a batch shows, or the length of the run, that it is better."""
        ranking = revisions.due(batch, self._ready().num_steps)
        if ranking is not None:
            self.ranking = ranking
            self._take_best(revisions.choice.notes)
        if revisions.is_over:
            self._revisions = None

    def _takes_next_best(self, error: RidgelineError) -> bool:
        """Whether there is another plan to continue with if the present one fails: it is in force then."""
        # Several workers end: one of them may have failed alone.
        ranking = None if self.world.size > 1 else without_best(self.ranking, error)
        if ranking is not None:
            self._say(ranking.notes[0])
            self.ranking = ranking
            self._revisions = None  # to which the plan that failed is still the best
            self._take_best(ranking.notes[:1])
        return ranking is not None

    def _take_best(self, notes: Sequence[str]) -> None:
        """Put the best plan in force, or what was written where nothing was ranked."""
        plan = Plan(workers=self.world.size, threads=self.world.threads)
        if self.ranking is not None:
            plan = self.ranking.best.plan
        if self._step is None or self._step.plan != plan:
            if self._step is not None:
                self._step.close()
            self._step = self._planned(plan)
            self._step.notes.extend(notes)
        self._forms.forget()

    def _choose(self) -> PlanChoice:
        """Rank plans by trials on the example batch; with what went otherwise than planned."""
        choice = PlanChoice(
            world=self.world,
            script=Script(self.model, self.loss_fn, self.optimizer),
            make=partial(self._planned, is_undone=True),
            describe=self._describe,
            allow=self._allow,
            steps=self._num_steps,
            seconds=self._seconds,
            machine=self.machine,
            say=self._say,
            forms=self._forms,
            clip_norm=self._clip_norm,
        )
        self.ranking, self.machine = choice.rank(self._example), choice.machine
        return choice
