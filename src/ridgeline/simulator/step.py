"""`simulate`: one training step on the virtual clock, before anything has run.

The frames are those that the runtime executes (`frames`), their contents the priced operators
(`pieces`), their order and overlap the events' (`events`).
"""

from ridgeline import units
from ridgeline.compiled_program import CompilerProgram
from ridgeline.errors import MachineError, PlanError
from ridgeline.execution import MODES
from ridgeline.given import Positive, checked
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.simulator.compiler.compile_time import compile_seconds
from ridgeline.simulator.memory import PEAK_CATEGORIES, memory_peak
from ridgeline.simulator.model import model_step, resized, setting_of
from ridgeline.simulator.schedule import schedule
from ridgeline.simulator.slowest import of_slowest
from ridgeline.timeline import Timeline
from ridgeline.workload import Workload

LONGEST_STEP_NS = 1 << 62
"""Longer steps, of more than a century, fit no file."""


@checked(PlanError)
def simulate(
    machine: Machine,
    workload: Workload,
    plan: Plan,
    *,
    world_size: int | None = None,
    details: bool = True,
    programs: tuple[CompilerProgram, ...] = (),
    compile_factor: Positive = 1.0,
) -> Timeline:
    """The predicted timeline of one training step in the steady state.

    Where the machine describes unequal devices it is that of the slowest of the workers, see `slowest`.

    Args:
        machine: The measured machine.
        workload: The step of one worker, with the batch that this worker gets.
        plan: How to run it.
        world_size: Workers; None takes those of the plan.
        details: Whether operators appear as detail spans inside the frames.
        programs: What torch's compiler made of this step when it was tried, of a plan that compiles; without
            them that is assumed.
        compile_factor: What compiling takes on this host over what is assumed of it.

    Raises:
        MachineError: the profile lacks a ceiling, or the collectives, that the step needs, or is so slow that
            the step takes more than a century.
        PlanError: the plan asks for what no step is run with, on the workload's device, or for more
            micro-batches than the batch has samples.
        WorkloadError: the workload has no operators.

    Source: dependency replay of Daydream (Zhu et al., ATC 2020) with the priced operators of this
        machine; communication overlapped at measured rates.
    """
    if world_size is not None and world_size != plan.workers:
        plan = resized(plan, world_size)
    setting = setting_of(machine, workload, plan)
    model = of_slowest(model_step(machine, workload, plan, setting, programs), machine, plan)
    spans = schedule(model, device=setting.device, execution=plan.execution, details=details)
    step_ns = max((span.end_ns for span in spans if not span.detail), default=0)
    if step_ns > LONGEST_STEP_NS:
        raise MachineError(
            f"wanted a step of at most {units.nanoseconds(LONGEST_STEP_NS)}, got {step_ns * 1e-9:.3g} s for "
            f"{workload.name} on {machine.fingerprint}; correct the profile's rates and seconds, or the "
            "what-if"
        )
    peak = memory_peak(workload, plan, machine)
    counters = {"peak_memory_bytes": float(peak.total_bytes)} | {
        f"peak_{category}_bytes": float(num_bytes)
        for category in PEAK_CATEGORIES
        if (num_bytes := getattr(peak, f"{category}_bytes")) is not None
    }
    notes = model.notes
    if MODES[plan.execution].is_compiled:
        counters["compile_s"] = compile_factor * compile_seconds(workload, plan.execution)
        counters["own_kernels"] = float(model.own_kernels)
        counters["own_bytes"] = float(model.own_bytes)
        notes = (
            *notes,
            f"assumed: compiling takes about {units.seconds(counters['compile_s'])} before the first step",
        )
    return Timeline(
        origin="predicted",
        title=workload.name,
        workers=plan.workers,
        spans=spans,
        steps_ns=(step_ns,),
        notes=notes,
        counters=counters,
    )
