"""A training step that runs as one program: traced, compiled, checked, and then called.

The first call is an eager step, which makes the optimizer's state. The second traces forward, loss, backward
and optimizer into one graph, compiles it, checks it against the eager step, and from there on a step is one
call of a compiled program (on a GPU, one replay of a CUDA graph) that updates the model's and the
optimizer's own tensors.
"""

import contextlib
import time
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ridgeline.capture.capturing import watched
from ridgeline.errors import CaptureError, PlanError
from ridgeline.guards.model_guard import check_scripted
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.optimizers.step_alone import allow_alone
from ridgeline.packages.compilers import working_compiler
from ridgeline.reach.generators import random_state_kept
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.body.requirements import advised_otherwise
from ridgeline.runtime.steps.checks.allowed_gaps import few
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.runtime.steps.whole_step.binding import bind
from ridgeline.runtime.steps.whole_step.compiling import (
    Prepared,
    accepted,
    compile_file,
    compile_graph,
)
from ridgeline.runtime.steps.whole_step.guards import StepGuards
from ridgeline.runtime.steps.whole_step.lifting import LiftedState, place_state
from ridgeline.runtime.steps.whole_step.names.left import LeftError, note_slots
from ridgeline.runtime.steps.whole_step.outside import without_gradients
from ridgeline.runtime.steps.whole_step.program import StepProgram, trace_body
from ridgeline.runtime.steps.whole_step.reads import StepReads, read_step
from ridgeline.runtime.steps.whole_step.saved.saving import save_step
from ridgeline.runtime.steps.whole_step.substitution import MissingStateError
from ridgeline.simulator.frames import WHOLE_STEP
from ridgeline.tensors import batch as batches
from ridgeline.tensors.batch_pattern import BatchPattern
from ridgeline.tensors.nests import tensors_in
from ridgeline.tensors.usual_shapes import UsualShapes
from ridgeline.workers.world import World

EAGER_STEPS = 1
"""Real steps before the trace: the first one makes the optimizer's state, exactly as it would."""
MOST_RECOMPILES = 3
"""After so many, some setting changes all the time, and compiling would cost more than it gains."""
ONE_FRAME = f"forward, backward and optimizer run as one program: frame '{WHOLE_STEP}' is all of it"
OTHERWISE = (
    "batches with another memory layout than the compiled ones, or hold a tensor twice, ran eagerly"
)
WITH_GRADIENTS = (
    "batches that want gradients themselves, which stay inside of one program, ran eagerly"
)
OF_STATE = "batches in memory that the step writes (of buffers, say) ran eagerly"
BEGUN_ANEW = "steps that begin with another kind of state under a name (None, say) ran eagerly"
OTHER_SHAPES = "batches of other shapes than the compiled one ran eagerly"


class StepGraphRunner:
    """Runs a step body as one compiled program.

    Settings that are numbers of Python (weight decay, momentum, betas) are constants of the program: when
    one changes it is compiled again after one eager step (which makes the state that the optimizer may need
    for it), noted and counted as `recaptures`, up to `MOST_RECOMPILES` times; from then on steps run eagerly,
    noted and counted as `eager_steps`. Learning rates are inputs.

    Args:
        body: The step of a worker alone.
        recorder: Notified of the steps; a step is one frame.
        world: A world of one.
        notes: Receives what was done differently, and why.
        packaged: Compile ahead of time into a file that needs no Python (AOTInductor) and run that: less
            time between operators, and `save` need not compile again. Else compile in this process.

    Raises:
        PlanError: there are several workers.
    """

    places: ClassVar[bool] = False

    def __init__(
        self, body: StepBody, recorder: Recorder, world: World, notes: list[str], *, packaged: bool
    ) -> None:
        if body.synchronizer is not None or world.size > 1:
            raise PlanError(
                f"wanted a single worker for execution={body.plan.execution!r}, got workers={world.size}; "
                "its one program has no room for the synchronisation of gradients: use 'compiled+graph' or "
                "'regional+graph' there"
            )
        self._body = body
        self._recorder = recorder
        self._world = world
        self._notes = notes
        self._packaged = packaged
        self._num_eager = 0
        self._num_recompiles = 0
        self._awaits_state = False
        self._begins_anew = False
        self._prepared: list[Prepared] = []
        self._shapes = UsualShapes()
        self._refused: set[batches.Signature] = set()
        self._lifted: LiftedState | None = None
        self._guards: StepGuards | None = None

    def __call__(self, batch: Any) -> Tensor:
        """One step, eager, compiling or as one program; the detached loss.

        Raises:
            CaptureError: the step cannot be written as one program, compiled, run or captured.
            EquivalenceError: the program differs from the eager step.

        Cost: The second call traces, compiles and checks, which takes seconds to minutes.
        """
        begin = time.perf_counter_ns()
        if why := watched():
            self._note(why)
            self._recorder.count("eager_steps")
            return self._body(batch, self._recorder)
        self._forget_outdated()
        found = self._find(batch)
        if self._num_eager < EAGER_STEPS:
            self._num_eager += 1
            # Only so that this shape is counted; the step runs eagerly in any case.
            self._shapes.is_usual(batch)
            return self._body(batch, self._recorder)
        if found is None and self._prepare(batch):
            begin = time.perf_counter_ns()  # compiling happens once; it is no cost of a step
            self._forget_outdated()  # the check may have left buffers in other tensors
            found = self._find(batch)
        if found is None:
            self._recorder.count("eager_steps")
            return self._body(batch, self._recorder)
        prepared, inputs = found
        prepared.program.lifted.rates.refresh()
        self._body.overhead_ns = time.perf_counter_ns() - begin
        self._recorder.mark(WHOLE_STEP)
        for draw in prepared.program.host_draws:
            draw.repeat()
        return prepared.run(inputs)

    def _find(self, batch: Any) -> tuple[Prepared, list[Tensor]] | None:
        """The program of this batch, and the batch's tensors.

        A program is forgotten where what it takes for granted holds for no batch any more.
        """
        for prepared in self._prepared:
            inputs = prepared.pattern.tensors(batch)
            if inputs is None:
                continue
            if any(tensor.requires_grad or tensor.is_inference() for tensor in inputs):
                return None
            if prepared.program.meets(inputs):
                self._note(OF_STATE)
                return None
            if prepared.reads.serves(batch):
                self._begins_anew = False
                return prepared, inputs
            why = prepared.reads.broken()
            if why is not None and prepared.program.carried and not self._begins_anew:
                self._begins_anew = True
                self._note(BEGUN_ANEW)
                return None
            if why is not None:
                self._forget(why)
                return None
            self._note(OTHERWISE)
        return None

    def has_program(self, batch: Any = None) -> bool:
        """Whether there is a compiled program for model and optimizer as they are now, for `save`.

        One that does not fit them any more is forgotten: its constants and its tensors are not theirs.

        Args:
            batch: Of the shape that it has to serve; None: of any.
        """
        allow_alone(self._body.optimizer)  # what forbids that is no change of the script's
        self._forget_outdated()
        why = next(filter(None, (prepared.reads.broken() for prepared in self._prepared)), None)
        if why is not None:
            self._forget(why)
        return bool(self._serving(batch))

    def save(self, path: str | Path, batch: Any = None) -> Path:
        """Save the program with its state, so that training continues elsewhere; see `save_step`.

        Args:
            path: The file.
            batch: Of the shape that the file will serve; None: the usual one.

        Raises:
            PlanError: no program was compiled yet, or since something changed that it takes for granted.
            OSError: the file cannot be written.
        """
        if not self.has_program(batch):
            raise PlanError(
                "wanted a compiled step to save, got none before the second call, or the second one after a "
                "change; run two steps first"
            )
        prepared = self._serving(batch)[0]
        prepared.program.lifted.rates.refresh()
        return save_step(path, prepared.program, file=prepared.file)

    def _serving(self, batch: Any) -> list[Prepared]:
        """The programs of batches of this shape, or of any: that of the usual shape first."""
        if batch is None:
            return self._prepared
        return [one for one in self._prepared if one.pattern.tensors(batch) is not None]

    def close(self) -> None:
        """Release programs, graphs and files; model and optimizer stay as they are.

        Cost: On a GPU, waits for the device.
        """
        for prepared in self._prepared:
            prepared.step.close()
            if prepared.file is not None:
                prepared.file.close()
        self._prepared.clear()

    def _forget_outdated(self) -> None:
        if self._guards is not None and (why := self._guards.broken()) is not None:
            self._forget(why)

    def _discard(self) -> None:
        """Start over: what is trained from now on may need state that only an eager step makes."""
        self.close()
        self._lifted = self._guards = None
        self._num_eager = 0

    def _forget(self, why: str) -> None:
        self._discard()
        self._num_recompiles += 1
        if self._num_recompiles > MOST_RECOMPILES:
            self._note(
                f"steps ran eagerly after {MOST_RECOMPILES} compilations, since settings keep changing "
                f"({why})"
            )
            return
        self._recorder.count("recaptures")
        self._note(f"compiled again because {why}")

    def _prepare(self, batch: Any) -> bool:
        """Make a program for this shape; False where the batch is better run eagerly."""
        if self._num_recompiles > MOST_RECOMPILES:
            return False
        tensors = tensors_in(batch)
        if any(tensor.requires_grad for tensor in tensors):
            self._note(WITH_GRADIENTS)
            return False
        if any(tensor.is_inference() for tensor in tensors):
            return False  # autograd may refuse to save one, which a trace of copies does not show
        if any(prepared.pattern.tensors(batch) is not None for prepared in self._prepared):
            return False  # a batch that lies otherwise in memory
        if self._prepared:
            signature = batches.signature(batch)
            is_repeated = self._shapes.is_worth_another(signature, len(self._prepared))
            if not is_repeated or signature in self._refused:
                self._note(self._shapes.why_other(batch, OTHER_SHAPES))
                return False
        elif not self._shapes.is_usual(batch):
            self._note(self._shapes.why_other(batch, OTHER_SHAPES))
            return False
        try:
            with random_state_kept():  # the step is to draw what it would have drawn as written
                prepared = self._compiled(batch)
            if prepared is None:
                return False
            self._prepared.append(prepared)
            self._check(prepared)
        except MissingStateError:
            # A parameter is trained only now: was added or released, or not used before. This step makes its
            # state, as it is written.
            self._discard()
            if self._awaits_state:
                raise
            self._awaits_state = True
            return False
        except BaseException:  # a program that was not checked to the end must not run
            self._discard()
            raise
        self._awaits_state = False
        self._recorder.counts["shapes"] = float(len(self._prepared))
        self._note(ONE_FRAME)
        return True

    def _compiled(self, batch: Any) -> Prepared | None:
        """The program; None where one of the usual shape runs, and this shape can have none."""
        try:
            return self._compile(batch)
        except CaptureError as error:
            if not self._prepared:
                # Who follows the advice must not be sent back here.
                body = self._body
                raise (
                    advised_otherwise(error, body.model, body.loss_fn) or error
                ) from error.__cause__
            # The usual shape trains on; trying again would compile for minutes in vain.
            self._refused.add(batches.signature(batch))
            self._note(f"{OTHER_SHAPES}: {error}")
            return None

    def _compile(self, batch: Any) -> Prepared:
        begin, body = time.perf_counter(), self._body
        if self._lifted is None:
            check_scripted(body.model)
            for note in place_state(body.optimizer, self._world.device):
                self._note(note)
            self._lifted = LiftedState(body.model, body.optimizer, self._world.device, body.loss_fn)
            self._guards = StepGuards(body.model, body.optimizer, self._lifted)
            self._name_without_gradients()
        batch = batches.apart(batch)  # as it is in the program, also to the code that is read
        note_slots(body.model, body.loss_fn)
        reads, program = self._traced(batch)
        reads.follow(
            [one for one in (each.example() for each in program.carried) if one is not None]
        )
        file = None
        # Files of megabytes in a temporary directory, which nobody else would close.
        with contextlib.ExitStack() as failing:
            if self._packaged:
                file = compile_file(program)
                failing.callback(file.close)
                if note := working_compiler().note:
                    self._note(note)
                call = file.load()
            else:
                call = compile_graph(program, self._notes)
            with accepted("bound to its state"):
                state = [entry.tensor for entry in program.state]
                step = bind(call, state, program.inputs, program.written)
            failing.pop_all()
        seconds = time.perf_counter() - begin
        self._recorder.counts["compile_s"] = self._recorder.counts.get("compile_s", 0.0) + seconds
        return Prepared(BatchPattern(program.batch), reads, program, step, file)

    def _traced(self, batch: Any) -> tuple[StepReads, StepProgram]:
        assert self._lifted is not None
        reads = read_step(self._body, batch, self._world.device.type)
        reads.check_writes()
        try:
            # All shapes share the lifted state, so that their programs write the same tensors.
            return reads, trace_body(self._body, batch, self._lifted, reads.guards[0].containers)
        except LeftError:
            reads.refuse_writes()  # by their names in the code
            raise

    def _name_without_gradients(self) -> None:
        """Say which gradients a step as written leaves for another optimizer, and a program does not."""
        body = self._body
        if others := without_gradients(body.model, body.loss_fn, body.optimizer):
            self._note(
                f"one program leaves no gradients of parameters that its optimizer does not hold, such as "
                f"{few(others)}; where another optimizer trains them, use execution='compiled' or 'eager'"
            )

    def _check(self, prepared: Prepared) -> None:
        program = prepared.program

        def replay() -> Tensor:
            program.lifted.is_current(
                is_check=True
            )  # takes over what the eager step put into new tensors
            program.lifted.rates.refresh()
            with accepted("run"):
                return prepared.run(program.inputs)

        with program.lifted.naming_untrained(program.state):
            check_replay(
                self._body,
                program.batch,
                program.inputs,
                LearningRates(self._body.optimizer),
                replay,
                world=self._world,
                notes=self._notes,
                # Else what the step as written leaves under names would be read by the program.
                runs_python=bool(program.shown.names),
            )
        program.lifted.rates.refresh()

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
