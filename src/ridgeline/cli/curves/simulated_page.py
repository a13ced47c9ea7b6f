"""`ridgeline simulate --report`: what was predicted, as an HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ridgeline.cli.curves.scaling_curve import STRONG, Curve
from ridgeline.reporting.report import report
from ridgeline.reporting.scaling_grids import lever_name, surely_helping
from ridgeline.simulator.curves.levers import Lever, levers
from ridgeline.simulator.curves.scaling import ScalingPoint, scaling_curve
from ridgeline.simulator.curves.what_if import what_if
from ridgeline.simulator.layers.intensity import Intensities
from ridgeline.simulator.model import resized
from ridgeline.timeline import Timeline
from ridgeline.verdict.scaling_nouns import Regime


def draw_curve(
    path: Path,
    found: Curve,
    points: Sequence[ScalingPoint],
    others: Mapping[str, Sequence[ScalingPoint]],
    regime: Regime,
    shared: Intensities | None = None,
) -> Path:
    """Write the page of a scaling curve, and return its path.

    Beside what was asked for, the curve is drawn with the part twice as fast that helps most at the largest
    number of workers, where one helps.

    Args:
        path: To write.
        found: The plan, and what it is predicted for.
        points: The curve.
        others: Question to the curve on another machine.
        regime: Whether the workers share one batch.
        shared: The layers on the wire, if they are to be on the page.

    Raises:
        OSError: the file cannot be written.

    Cost: 105 predictions for the levers, and one for each number of workers.
    """
    most = points[-1].workers
    # Where most workers are, since what helps there is what ends the scaling.
    gains = levers(found.machine, found.load(most), resized(found.plan, most))
    curves = dict(others)
    # One at most, and no gain that may be noise.
    for best in surely_helping(gains)[:1]:
        faster = what_if(found.machine, best.factors, found.all_ops)
        # What the user asked under this name stays as it is.
        curves.setdefault(
            lever_name(best), scaling_curve(faster, found.loads, found.plan, found.counts)
        )
    scaling = found.scaling(most, regime, points, others=curves, levers=gains)
    return report(path, machine=found.machine, predicted_scaling=scaling, intensities=shared)


def draw_step(
    path: Path,
    found: Curve,
    timeline: Timeline,
    points: Sequence[ScalingPoint],
    others: Mapping[str, Sequence[ScalingPoint]],
    gains: Sequence[Lever],
) -> Path:
    """Write the page of a step, with the curve up to its number of workers, and return its path.

    Args:
        path: To write.
        found: The plan, and what it is predicted for.
        timeline: Of the step.
        points: The curve; its workers share one batch.
        others: Question to the curve on another machine.
        gains: Of faster parts, at the number of workers of the step.

    Raises:
        OSError: the file cannot be written.
    """
    scaling = found.scaling(timeline.workers, STRONG, points, others=others, levers=gains)
    return report(
        path,
        machine=found.machine,
        workload=found.load(timeline.workers),
        predicted=timeline,
        predicted_scaling=scaling,
    )
