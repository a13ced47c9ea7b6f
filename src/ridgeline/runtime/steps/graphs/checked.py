"""Running a step that is compiled, or replays its model, after it was checked against the eager one."""

import contextlib
import time
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.capture.capturing import on_stream, watched, watched_if_compiled
from ridgeline.capture.interception import is_special_to_compiler
from ridgeline.errors import CaptureError, WorkloadError
from ridgeline.execution import MODES
from ridgeline.lint.child_trial import try_step_in_child
from ridgeline.lint.child_worker import is_trial
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.optimizers.step_hooks import without_step_hooks
from ridgeline.programs.compiling import failing_parts_as_written, num_failed
from ridgeline.reach.reach import Reach
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.runtime.steps.checks.hook_order import check_hook_order, num_hooks
from ridgeline.runtime.steps.graphs.tensor_types import TensorTypes
from ridgeline.tensors.batch import rebuilt
from ridgeline.tensors.copies import own_copies
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World

OF_OTHER_CLASSES = "steps on batches with subclasses of Tensor ran as they were written"
OF_BUFFERS = "steps on batches in the memory of buffers ran as they were written"
OF_OTHERS = (
    "steps before the check, which all workers make, ran as they were written, as on another worker"
)
AS_WRITTEN = (
    "torch's compiler left a part of the step as it was written when it compiled anew for what had changed "
    "since the check; if it failed there, its log says how"
)


class CheckedRunner:
    """Runs the body in its compiled form; the first call compiles and checks.

    The compiler guards on everything that it baked in, so another shape or setting compiles again. What is
    compiled for other types of parameters or buffers is checked again.
    """

    places: ClassVar[bool] = False

    def __init__(self, body: StepBody, recorder: Recorder, world: World, notes: list[str]) -> None:
        self._body = body
        self._recorder = recorder
        self._world = world
        self._notes = notes
        self._types: TensorTypes | None = None
        """Those of what was checked; None before."""
        self._num_hooks = 0

    def __call__(self, batch: Any) -> Tensor:
        """One step; the detached loss.

        What a compiled step calls, and saves for its backward pass, is not what its code does: where modes or
        hooks see it or give something else back, the step runs as it was written.

        Raises:
            EquivalenceError: the compiled step differs from the eager one.
            CaptureError: the step cannot run in this form, and has not begun; see `check_hook_order`, too.
            WorkloadError: the replayed model failed in a step that had begun.
        """
        if self._body.form.refusal is not None:
            raise self._body.form.refusal
        replays_model = MODES[self._body.plan.execution].replays_model
        leaves = pytree.tree_leaves(batch)
        why = watched() if replays_model else _watches_compiled(leaves)
        # All workers make the check, or none does: a profile may be taken on one of them.
        if self._types is None and largest_of_workers(float(bool(why)), self._world):
            why = why or OF_OTHERS
        if why and not replays_model:
            return self._run_as_written(batch, why)
        if not why and (num := num_hooks(self._body)) != self._num_hooks:
            check_hook_order(self._body, batch)
            self._num_hooks = num
        if is_first := not (why or self._is_checked()):
            self._check(batch)
        if self._types is not None and self._types.meet(leaves):
            return self._run_as_written(batch, OF_BUFFERS)
        # The compiler compiles again inside of the call, so its tally is all that shows it: from here on,
        # since a script may compile something else between two steps.
        num_before = _num_graphs()
        loss = self._run(batch)
        # A model that is replayed is captured again behind the check, for which the compiler reads its code.
        is_again = MODES[self._body.plan.execution].is_compiled and not (is_first and replays_model)
        if is_again and _num_graphs() != num_before:
            self._count_recompilation()
        return loss

    def close(self) -> None:
        """Drop the graphs of the model, if there are any."""
        self._body.form.close()

    def _is_checked(self) -> bool:
        """Whether the check was of tensors of these types.

        Source: torch 2.13 takes a scalar in float64 on a CPU for a number of Python, so that a program leaves
        out what it writes to one.
        """
        return self._types is not None and self._types.hold()

    def _run(self, batch: Any) -> Tensor:
        """The step; what the compiler fails on now runs as it was written, since parts before it have run."""
        num_before = num_failed()
        try:
            with failing_parts_as_written():
                loss = self._body(batch, self._recorder)
        except CaptureError as error:
            if not self._body.form.trains:
                raise
            # Whoever catches the other kind of error takes the step again.
            raise WorkloadError(f"{error}. A part of this step has run") from error
        if num_failed() != num_before and AS_WRITTEN not in self._notes:
            self._notes.append(AS_WRITTEN)
        return loss

    def _run_as_written(self, batch: Any, why: str) -> Tensor:
        self._recorder.count("eager_steps")
        if why not in self._notes:
            self._notes.append(why)
        with self._body.as_written():
            return self._body(batch, self._recorder)

    def _check(self, batch: Any) -> None:
        """Compile and compare on a copy of the batch; gradients' order is measured by the next step."""
        begin = time.perf_counter()
        if self._body.is_undone and self._body.findings.value_shapes:
            self._try_elsewhere(batch)
        check_compiled(
            self._body, batch, LearningRates(self._body.optimizer), self._world, self._notes
        )
        if MODES[self._body.plan.execution].replays_model:
            # The check has undone what the captured call did in Python: the next one does it again.
            self._body.form.close()
            self._body.form.trains = not self._body.is_undone
        self._recorder.counts["compile_s"] = time.perf_counter() - begin
        self._types = TensorTypes(Reach(self._body.model, self._body.loss_fn).modules)

    def _try_elsewhere(self, batch: Any) -> None:
        """Have a child process take some steps first: a wrong program for a GPU ends this one's use of it.

        Source: the program of a `GATConv` of torch-geometric, whose edges without loops are counted on the
        device, reads from misaligned addresses on an H100 (torch 2.11).
        """
        if self._world.device.type != "cuda" or self._world.size > 1 or is_trial():
            return
        outcome = try_step_in_child(self._body, batch, self._body.plan)
        if outcome.status != "ok":
            raise CaptureError(
                f"wanted execution={self._body.plan.execution!r} to run a step with shapes that depend on "
                f"values, got one that {outcome}; this process did not try. Such shapes: "
                f"{'; '.join(self._body.findings.value_shapes)}"
            )
        self._notes.append(f"compiled with shapes that depend on values, it {outcome}")

    def _count_recompilation(self) -> None:
        self._recorder.count("recompiles")
        note = (
            "compiled again after the check, because a shape or a value that the compiler had baked in "
            "changed; if it continues, make that value a tensor, or use execution='eager'"
        )
        if note not in self._notes:
            self._notes.append(note)


def _watches_compiled(leaves: list[Any]) -> str:
    """Why a compiled step would not do with a batch of these what its code does; empty if it does."""
    return watched_if_compiled() or OF_OTHER_CLASSES * any(map(is_special_to_compiler, leaves))


def check_compiled(
    body: StepBody,
    batch: Any,
    rates: LearningRates,
    world: World,
    notes: list[str],
    stream: "torch.cuda.Stream | None" = None,
) -> None:
    """Compile the body, and compare it with the eager step on a copy of the batch.

    Arguments are those of `check_replay`; both ways run on the stream.

    Raises:
        EquivalenceError: the compiled step differs.
        SideEffectError: see `check_replay`.

    Cost: See `check_replay`, and compiling.
    """
    flat, structure = pytree.tree_flatten(batch)
    # The check writes perturbed values into these; the user's batch must stay as it is.
    copies = own_copies(flat)
    example = pytree.tree_unflatten(copies, structure)
    silent = Recorder(HostClock())
    replays_model = MODES[body.plan.execution].replays_model

    def compiled() -> Tensor:
        with contextlib.nullcontext() if stream is None else on_stream(stream):
            return body(rebuilt(example), silent)

    # Hooks are the user's code, which would count or log steps that are undone.
    with without_step_hooks(body.optimizer):
        check_replay(
            body,
            example,
            # Each once: code may ask whether two are one, and one is to be changed once.
            [*{id(leaf): leaf for leaf in copies if isinstance(leaf, Tensor)}.values()],
            rates,
            compiled,
            world=world,
            notes=notes,
            stream=stream,
            runs_python=not replays_model,
            is_first=replays_model,
        )
    if body.synchronizer is not None:  # the order that it has seen is that of the eager step
        body.synchronizer.forget_order()


def _num_graphs() -> int:
    """Graphs that the compiler has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]  # noqa: SLF001 - its only tally
