"""Our steps: the plans that the planner takes for this network, and what torch's hooks do, done by ours."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ridgeline import units
from ridgeline.experiments.sync.peers import LOCAL_STEPS, RANK
from ridgeline.experiments.sync.training import CHECKED_STEPS, Step, Training, make_runner
from ridgeline.experiments.ways.case import Way, WayRunner
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.planner.exchanges.exchanges import APART_PERMISSION, PERMISSION
from ridgeline.probe.measure import measure
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.simulator.exchange.synchronising import sent_bytes
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import delay_of
from ridgeline.tracing.capture import trace
from ridgeline.workload import Workload

EXECUTION = "eager"
"""As the others run: what is compared is how gradients are sent."""
FAR_APART = 50
"""Steps between two exchanges of DiLoCo, at the lower end of those of the paper."""
DELAY = 40
"""Of these, steps that continue while parameters travel: ResNet-18 takes as long as 24 at 100 Mbit/s."""
ENCODED_DELAY = 20
"""Likewise, where a quarter as many bytes travel."""


class WantedPlan(NamedTuple):
    """What the planner is asked for: knobs that are set, and changes of the maths that it may make."""

    fixed: dict[str, Any]
    allow: tuple[str, ...] = ()


WANTED = {
    "exact": WantedPlan({}),
    "lossy allowed": WantedPlan({}, (PERMISSION, APART_PERMISSION)),
    f"powersgd, rank {RANK}": WantedPlan({"compression": "powersgd"}, (PERMISSION,)),
    **{
        name: WantedPlan({"compression": name}, (PERMISSION,))
        for name in ("bf16", "int8", "sign", "topk")
    },
    f"every {LOCAL_STEPS} steps": WantedPlan({"every": LOCAL_STEPS}),
    f"every {FAR_APART} steps": WantedPlan({"every": FAR_APART}),
    f"every {FAR_APART} steps, {DELAY} late": WantedPlan(
        {"every": FAR_APART, "options": {"delay": DELAY}}
    ),
    f"every {FAR_APART} steps, {ENCODED_DELAY} late, int8": WantedPlan(
        {"compression": "int8", "every": FAR_APART, "options": {"delay": ENCODED_DELAY}}
    ),
}
QUICK_WANTED = ("exact", "lossy allowed", f"powersgd, rank {RANK}")


class Profile:
    """This machine and its network for the cases of one link.

    The first case measures all again, since they may have been busy when they were measured before; the
    others what their steps need besides.
    """

    def __init__(self) -> None:
        self._is_fresh = False

    def measured(self, training: Training, workload: Workload) -> Machine:
        """The profile, with what this workload needs. Cost: seconds; over a slow link half a minute."""
        machine = measure(
            workload=workload, process_group=training.world.group(), refresh=not self._is_fresh
        )
        self._is_fresh = True
        return machine


def our_ways(
    training: Training, profile: Profile, *, names: Iterable[str], is_counted: bool
) -> Sequence[Way]:
    """A way for each of those names of `WANTED`.

    Cost: Measures what the profile lacks, and traces the step.
    """
    model = training.made()
    optimizer = training.optimizer(model)
    workload = trace(model, training.loss_fn, optimizer, training.batches[0], name=training.name)
    machine = profile.measured(training, workload)
    always = {"execution": EXECUTION, "threads": training.world.threads}
    ways = []
    for words in names:
        wanted = WANTED[words]
        # On every worker by the same profile, so that all choose alike without being told.
        ranking = choose(
            machine,
            workload,
            world_size=training.world.size,
            fixed={**always, **wanted.fixed},
            allow=wanted.allow,
        )
        plan = ranking.best.plan
        predicted_s = simulate(machine, workload, plan).step_ns * 1e-9
        handed = units.num_bytes(sum(sent_bytes(workload, plan)))
        notes = (f"{plan!r}: {handed} handed over a step",)
        make = partial(_runner, training, plan, is_counted, predicted_s, notes)
        ways.append(Way(f"ridgeline, {words}", "ridgeline", make))
    return ways


def _runner(
    training: Training, plan: Plan, is_counted: bool, predicted_s: float, notes: tuple[str, ...]
) -> WayRunner:
    def make(model: nn.Module) -> Step:
        optimizer: Any = training.optimizer(model)
        return PlannedStep(model, training.loss_fn, optimizer, plan, world=training.world)

    steps = plan.sync.every
    # A run begins with the step that starts an exchange: the link is free again when it ends.
    lead = (steps - 1 - CHECKED_STEPS) % steps if delay_of(plan.sync) else 0
    return make_runner(
        training, make, is_counted, steps, lead, predicted_s=predicted_s, notes=notes
    )
