"""Ridgeline's own form: `TrainStep(plan="auto")`, and what it says about its choice.

Everything that depends on what the session reports is here.
"""

from ridgeline.experiments.contests import wall_s
from ridgeline.experiments.networks.request import NetworkSettings
from ridgeline.experiments.networks.result import Headline, TriedPlan
from ridgeline.experiments.networks.sides.forms import NetworkSubject, optimizer_options
from ridgeline.experiments.ways.case import WayRunner
from ridgeline.machine import Machine, Quantity
from ridgeline.plan import Plan
from ridgeline.planner.labels import label
from ridgeline.session import TrainStep
from ridgeline.timeline import Timeline


class Ours:
    """One network under `TrainStep(plan="auto")`, as a user's script would have it.

    Args:
        subject: The network.
        how: Has the seconds it may take to choose, and a profile to use instead of measuring.
        allow: Changes of the maths it may make.

    Attributes:
        step: The step itself.
        batch: What it is for.
        plan_s: What choosing took; None before `prepare`.
    """

    def __init__(
        self, subject: NetworkSubject, how: NetworkSettings, *, allow: tuple[str, ...] = ()
    ) -> None:
        network, world = subject.network, subject.world
        # The same form of the optimizer as its rivals have: what is compared is the plan.
        options = optimizer_options(network, world.device)
        setup = network.build(world.device, subject.scale, rank=world.rank, **options)
        self.batch = setup.batch
        self.plan_s: float | None = None
        self.step = TrainStep(
            setup.model,
            setup.loss_fn,
            setup.optimizer,
            "auto",
            allow=allow,
            machine=Machine.load(how.machine) if how.machine else None,
            seconds=how.budget_s,
            steps=how.run_steps,
            clip_norm=network.clip_norm,
            device=world.kind,
            name=network.name,
        )

    def prepare(self) -> Plan:
        """Choose a plan, and time that."""
        self.plan_s = wall_s(lambda: self.step.prepare(self.batch))
        return self.step.plan

    def runner(self) -> WayRunner:
        """The step as one of the forms."""
        return WayRunner(run=lambda: self.step(self.batch), close=self.step.close)


def headline(step: TrainStep, trained_s: Quantity | None = None) -> Headline:
    """What was said of the plan in force, before any trial and when training began."""
    best = step.ranking.best if step.ranking is not None else None
    return Headline(
        plan=repr(step.plan),
        execution=step.plan.execution,
        before_s=None if best is None else seconds_of(best.timeline),
        expected_s=seconds_of(step.expected()),
        trained_s=trained_s,
    )


def tried_plans(step: TrainStep) -> tuple[TriedPlan, ...]:
    """The plans that were tried for real, in the order of the ranking."""
    if step.ranking is None:
        return ()
    return tuple(
        TriedPlan(
            plan=label(candidate.plan),
            execution=candidate.plan.execution,
            before_s=seconds_of(candidate.timeline),
            measured_s=None if candidate.measured is None else seconds_of(candidate.measured),
            failure=candidate.failure,
        )
        for candidate in step.ranking.candidates
        # The rest was predicted alone, which says nothing of how good predictions are.
        if candidate.measured is not None or candidate.failure
    )


def notes_of(step: TrainStep) -> tuple[str, ...]:
    """What ranking and step have to say."""
    ranked = () if step.ranking is None else step.ranking.notes
    return (*ranked, *step.notes)


def seconds_of(timeline: Timeline) -> float:
    """Of a step."""
    return timeline.step_ns * 1e-9
