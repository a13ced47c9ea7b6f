"""Our steps: the plan that the planner takes for this network, exact, and lossy where codecs are offered."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from ridgeline import units
from ridgeline.experiments.sync.training import Step, Training, make_runner
from ridgeline.experiments.ways.case import Runner, Way
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.planner.exchanges import PERMISSION
from ridgeline.probe.measure import measure
from ridgeline.runtime.step import TrainStep
from ridgeline.simulator.step import simulate
from ridgeline.simulator.synchronising import sent_bytes
from ridgeline.synchronisation import COMPRESSIONS, offered_compressions
from ridgeline.tracing.capture import trace

EXECUTION = "eager"
"""As the others run: what is compared is how gradients are sent."""


def our_ways(training: Training, *, is_counted: bool) -> Sequence[Way]:
    """One way without permission to lose anything, and one with it where there is something to permit.

    Cost: Measures this machine and its network as far as they are not known, and traces the step.
    """
    model = training.made()
    optimizer = training.optimizer(model)
    workload = trace(model, training.loss_fn, optimizer, training.batches[0], name=training.name)
    machine = measure(workload=workload, process_group=training.world.group())
    kind, size = training.world.kind, training.world.size
    fixed = {"execution": EXECUTION, "threads": training.world.threads}
    lossy = [name for name in offered_compressions(kind) if not COMPRESSIONS[name].is_exact]
    allowed = {"exact": (), "lossy allowed": (PERMISSION,)} if lossy else {"exact": ()}
    ways = []
    for words, allow in allowed.items():
        plan = choose(machine, workload, world_size=size, fixed=fixed, allow=allow).best.plan
        predicted_s = simulate(machine, workload, plan).step_ns * 1e-9
        handed = units.num_bytes(sum(sent_bytes(workload, plan)))
        notes = (f"{plan!r}: {handed} handed over a step",)
        make = partial(_runner, training, plan, is_counted, predicted_s, notes)
        ways.append(Way(f"ridgeline, {words}", "ridgeline", make))
    return ways


def _runner(
    training: Training, plan: Plan, is_counted: bool, predicted_s: float, notes: tuple[str, ...]
) -> Runner:
    def make(model: nn.Module) -> Step:
        optimizer: Any = training.optimizer(model)
        return TrainStep(model, training.loss_fn, optimizer, plan, world=training.world)

    return make_runner(training, make, is_counted, predicted_s=predicted_s, notes=notes)
