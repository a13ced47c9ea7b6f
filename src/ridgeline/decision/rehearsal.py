"""Steps that each of several workers runs alone before all run them together.

An error inside of a step that exchanges gradients leaves the other workers waiting. What the user's code may
refuse (`.view` in another memory format, a loss in another precision) shows in a step without the others, and
all of them hear of it. A program for CPUs can ruin the process that runs it: a child runs it first.
"""

import contextlib
import time
from typing import Any

from ridgeline.decision.trial import Script
from ridgeline.errors import PlanError, SideEffectError, first_line
from ridgeline.packages.program_trial import programs_tried_first
from ridgeline.plan import Plan
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import is_compiled
from ridgeline.programs.compiling import CompiledForms
from ridgeline.reach.side_effects import refusing_writes
from ridgeline.reach.undo import undone
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World


class Rehearsals:
    """What plans ask of the user's own code, tried once by each of several workers alone.

    Model and optimizer, and all else that the step can reach, are put back afterwards. Nothing is rehearsed
    in a world of one. `forms` receive what is compiled for it, for the trials.
    """

    def __init__(self, script: Script, world: World, forms: CompiledForms) -> None:
        self._script = script
        self._world = world
        self._forms = forms
        self._passed: list[Plan] = []

    def __call__(self, plan: Plan, example: Any) -> float:
        """Run a step of this plan alone, unless one like it ran. All workers call this.

        On a GPU it runs uncompiled, on a CPU compiled if the plan is.

        Returns:
            The seconds of compiling, on this worker.

        Raises:
            PlanError: on all workers, if it failed on any: with the first rank that it failed on, and how.
            SideEffectError: likewise, if the step of one writes outside of the process.

        Cost: A step, a copy of all that it may change, and an exchange between the workers.
        """
        # Only programs for CPUs can ruin the process that runs them; on a GPU a step that is not compiled
        # shows what user code refuses.
        compiles = self._world.kind == "cpu" and is_compiled(plan)
        alone = Plan(
            execution=plan.execution if compiles else "eager",
            threads=plan.threads,
            precision=plan.precision,
            memory_format=plan.memory_format,
            optimizer=plan.optimizer,
        )
        as_written = Plan(threads=plan.threads)
        if self._world.size == 1 or alone == as_written or alone in self._passed:
            return 0.0
        begin = time.perf_counter()
        failure = self._failure(alone, example)
        everyone = gather_bytes(failure.encode(), self._world)
        for rank, words in zip(self._world.ranks(), everyone, strict=True):
            kind, _, what = words.decode().partition(" ")
            if kind == "writes":
                raise SideEffectError(f"{what} (on rank {rank})")
            if kind == "fails":
                raise PlanError(
                    f"wanted a step that runs as {label(plan)}, got {what} on rank {rank}; other plans are "
                    "tried instead"
                )
        # Only what passed on all: the others raise, and their plans are not tried.
        self._passed.append(alone)
        return time.perf_counter() - begin if compiles else 0.0

    def _failure(self, alone: Plan, example: Any) -> str:
        """How a step by this worker alone failed; empty if it did not."""
        world = World(0, 1, self._world.local_rank, self._world.device)
        kind, forms = world.device.type, self._forms
        first = programs_tried_first([]) if is_compiled(alone) else contextlib.nullcontext()
        try:
            with (
                undone(*self._script, example),
                refusing_writes(),
                first,
                PlannedStep(*self._script, alone, device=kind, world=world, forms=forms) as step,
            ):
                step(example)
        except SideEffectError as error:
            return f"writes {error}"
        except Exception as error:  # noqa: BLE001 - of any kind: the others must hear of it
            # A compiled or captured step may need less.
            if type(error).__name__ == "OutOfMemoryError":
                return ""
            return f"fails {type(error).__name__}: {first_line(error)}"
        return ""
