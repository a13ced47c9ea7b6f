"""A step that no recorder can see into: one operator a phase, with the seconds that the phase really took."""

from collections.abc import Mapping

import msgspec

from ridgeline.machine import OperatorTiming, Quantity, Setting
from ridgeline.tracing.described import make_workload, spec_of
from ridgeline.tracing.operators.traffic import tensor_bytes
from ridgeline.tracing.recorded_step import Step
from ridgeline.tracing.stepping import fused_bytes, state_tensors
from ridgeline.workload import MemoryPoint, Op, Phase, TensorSpec, Workload

OPAQUE = "ridgeline.opaque."
"""How the names of such operators begin; the phase follows."""
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


def opaque_workload(
    step: Step, name: str, seconds: Mapping[Phase, float], ready: tuple[str, ...], why: str
) -> Workload:
    """The workload of a step of which only the phases are known.

    Args:
        step: It has just run: gradients and optimizer state exist.
        name: For reports.
        seconds: What each phase took.
        ready: Parameters that got gradients, in the order in which they were complete.
        why: Nothing more is known, for the notes.
    """
    parameters = [*step.model.parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = state_tensors(step.optimizer)
    held, made, kept = (sum(map(tensor_bytes, part)) for part in (parameters, gradients, state))
    buffers = sum(map(tensor_bytes, step.model.buffers()))
    inputs = tuple(spec_of(p.detach(), "parameter") for p in parameters)
    traffic: dict[Phase, tuple[int, int]] = {
        "forward": (held, 0),
        "backward": (held, made),
        "optimizer": (held + made + kept, held + kept),
    }
    note = (
        "each phase counts as one operator, as long as the phase took, and activations are not "
        f"counted: {why}"
    )
    ops = tuple(
        _op(phase, index, inputs, seconds[phase], traffic[phase])
        for index, phase in enumerate(PHASES)
    )
    points = tuple(
        MemoryPoint(
            op=index,
            parameter_bytes=held + buffers,
            # After forward there are none yet, since steps begin without.
            gradient_bytes=made if index else 0,
            state_bytes=kept,
            activation_bytes=0,
        )
        for index in range(len(PHASES))
    )
    return make_workload(
        step,
        name,
        ops,
        dict.fromkeys(ready, PHASES.index("backward")),
        memory=points,
        fused_optimizer_bytes=fused_bytes(step.optimizer, step.optimizer),
        notes=(note,),
    )


def is_opaque(workload: Workload) -> bool:
    """Whether phases of the workload itself are known by nothing but their seconds."""
    return any(op.name.startswith(OPAQUE) for op in workload.ops)


def opaque_timings(workload: Workload, setting: Setting) -> tuple[OperatorTiming, ...]:
    """What the opaque operators of a workload took where it was made, as a profile of that machine lists it.

    Those of its variants, too; the setting is that in which it was made.
    """
    found: dict[str, OperatorTiming] = {}
    for op in (op for load in (workload, *workload.variants) for op in load.ops):
        if op.name.startswith(OPAQUE):
            seconds = msgspec.json.decode(op.arguments)["kwargs"]["seconds"]
            quantity = Quantity.measured([seconds], "s")
            found[op.key] = OperatorTiming(setting=setting, key=op.key, seconds=quantity)
    return tuple(found.values())


def _op(
    phase: Phase,
    index: int,
    inputs: tuple[TensorSpec, ...],
    seconds: float,
    traffic: tuple[int, int],
) -> Op:
    return Op(
        name=OPAQUE + phase,
        phase=phase,
        module="",
        family="other",
        dtype=inputs[0].dtype,
        inputs=inputs,
        outputs=(),
        # In the arguments they distinguish, as keys do, steps that take different times.
        arguments=msgspec.json.encode({"args": [], "kwargs": {"seconds": seconds}}).decode(),
        flops=0,
        bytes_read=traffic[0],
        bytes_written=traffic[1],
        dependencies=(index - 1,) if index else (),
    )
