"""`ridgeline simulate` for several numbers of workers: one plan, predicted for each."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ridgeline.cli.arguments.inputs import (
    differing,
    load,
    measured_for,
    profile,
    traced,
)
from ridgeline.cli.command import Output
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.machine import Machine
from ridgeline.machine.cluster import crossings
from ridgeline.plan import Plan, Sync
from ridgeline.planner import choose
from ridgeline.simulator.curves.scaling import ScalingPoint, scaling_curve
from ridgeline.verdict.predicted_scaling import PredictedScaling, predicted_scaling
from ridgeline.verdict.scaling_nouns import Regime
from ridgeline.workload import Workload

WEAK, STRONG = "weak", "strong"


class Curve(msgspec.Struct, frozen=True):
    """A plan, and what it is predicted to do with several numbers of workers."""

    plan: Plan
    machine: Machine
    loads: Workload | Mapping[int, Workload]
    counts: tuple[int, ...]

    @property
    def all_ops(self) -> Workload:
        """A workload with the operators of all steps, which says what limits them."""
        loads = [self.loads] if isinstance(self.loads, Workload) else [*self.loads.values()]
        # Once each, as steps for several numbers of workers share most of them.
        ops = {op.key: op for load in loads for op in load.ops}
        return msgspec.structs.replace(loads[0], ops=tuple(ops.values()))

    def load(self, workers: int) -> Workload:
        """What each of so many workers does."""
        return self.loads if isinstance(self.loads, Workload) else self.loads[workers]

    def points(self, machine: Machine | None = None) -> tuple[ScalingPoint, ...]:
        """The predictions, with intervals; on another machine, where one is given."""
        return scaling_curve(
            machine or self.machine, self.loads, self.plan, self.counts, with_intervals=True
        )

    def scaling(
        self, most: int, regime: Regime, points: Sequence[ScalingPoint], **more: Any
    ) -> PredictedScaling:
        """What is reported of points up to `most` workers; `more` goes to `predicted_scaling`."""
        load = self.load(most)
        samples = load.samples * (most if regime == STRONG else 1)
        return predicted_scaling(
            load.name, regime, samples, self.machine, self.plan, points, **more
        )


def curve(args: argparse.Namespace, output: Output) -> Curve:
    """The best plan for the most workers that the machine has room for, two at least, and all steps.

    Raises:
        PlanError: the workers share one batch, which so many cannot do equally.
        FileFormatError: the file is no machine profile.
        TaskError: the task is unknown.
        WorkloadError: the step cannot be traced.
        LaunchError: a measuring process failed.
    """
    from ridgeline.runtime.training.sampler import check_batch_size

    task, machine, counts = load(args), profile(args, output), args.devices
    if args.scaling == STRONG:
        for count in counts:
            check_batch_size(task.batch_size, count, counts)
    room = machine.num_places
    # What one worker alone does best, such as a step that is one program, several may be unable to do.
    several = [count for count in counts if count > 1]
    first = max((count for count in several if count <= room), default=min(several))
    with Heartbeat(output.progress) as heartbeat:
        # A step of one worker is what each of any number does that has a batch of its own.
        steps = traced(
            task, counts if args.scaling == STRONG else (1,), machine.device_kind, heartbeat
        )
        of_count = dict.fromkeys(counts, steps[1]) if args.scaling == WEAK else steps
        if args.machine is None:
            machine = measured_for(machine, of_count, heartbeat)
    fixed: dict[str, object] = {"workers": first}
    if crossings(machine.cluster, max(counts)):
        # Some other ways to exchange gradients need one host, and none is measured between several.
        fixed["algorithm"] = Sync().algorithm
    plan = choose(machine, {first: of_count[first]}, fixed=fixed).best.plan
    machine = differing(machine, args.stragglers, of_count[first], plan)
    # One workload for all numbers, where each worker has a batch of its own.
    loads = steps[1] if args.scaling == WEAK else steps
    return Curve(plan, machine, loads, tuple(counts))
