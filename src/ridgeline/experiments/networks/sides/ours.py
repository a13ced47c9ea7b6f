"""Ridgeline's own form: `TrainStep(plan="auto")`, and what it says about its choice.

Everything that depends on what the session reports is here.
"""

import time
from typing import Any

from torch import Tensor

from ridgeline.experiments.networks.network import Setup
from ridgeline.experiments.networks.result import Headline, TriedPlan
from ridgeline.experiments.networks.sides.forms import (
    NetworkRunner,
    NetworkSubject,
    optimizer_options,
)
from ridgeline.machine import Machine, Quantity
from ridgeline.plan import Plan
from ridgeline.planner.labels import label
from ridgeline.probe.timing import synchronize
from ridgeline.session import TrainStep
from ridgeline.timeline import Timeline


class Ours:
    """One network under `TrainStep(plan="auto")`, as a user's script would have it.

    Args:
        subject: The network.
        allow: Changes of the maths it may make.
        budget_s: Seconds it may take to choose; None: its own.
        machine: A profile to use instead of measuring.

    Attributes:
        step: The step itself.
        batch: What it is for.
        plan_s: What choosing took; None before `prepare`.
        notes: What the adapter had to leave out.
    """

    def __init__(
        self,
        subject: NetworkSubject,
        *,
        allow: tuple[str, ...] = (),
        budget_s: float | None = None,
        machine: Machine | None = None,
    ) -> None:
        world = subject.world
        options = optimizer_options(subject.network, world.device)
        setup = subject.network.build(world.device, subject.scale, rank=world.rank, **options)
        self.notes: list[str] = []
        self.batch = setup.batch
        self.plan_s: float | None = None
        self._subject = subject
        self._setup = setup
        self._settings: dict[str, Any] = {"allow": allow, "machine": machine, "seconds": budget_s}
        self.step = self._make()

    def prepare(self) -> Plan:
        """Choose a plan, and time that."""
        synchronize()
        begin = time.perf_counter()
        plan = self.step.prepare(self.batch)
        synchronize()
        self.plan_s = time.perf_counter() - begin
        return plan

    def runner(self) -> NetworkRunner:
        """The step as one of the forms."""
        return NetworkRunner(run=self._run, close=self.step.close)

    def _run(self) -> Tensor:
        return self.step(self.batch)

    def _make(self) -> TrainStep:
        setup: Setup = self._setup
        network = self._subject.network
        return TrainStep(
            setup.model,
            setup.loss_fn,
            setup.optimizer,
            "auto",
            clip_norm=network.clip_norm,
            device=self._subject.world.kind,
            name=network.name,
            **self._settings,
        )


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
        if candidate.measured is not None or candidate.failure
    )


def notes_of(step: TrainStep) -> tuple[str, ...]:
    """What ranking and step have to say."""
    ranked = () if step.ranking is None else step.ranking.notes
    return (*ranked, *step.notes)


def seconds_of(timeline: Timeline) -> float:
    """Of a step."""
    return timeline.step_ns * 1e-9
