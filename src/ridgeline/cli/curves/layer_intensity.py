"""`ridgeline simulate --intensity`: which layers are shared better by samples, and which by columns."""

import argparse

from msgspec import structs

from ridgeline.cli.arguments.inputs import load, profile, traced, worker_counts
from ridgeline.cli.command import FINE, Output
from ridgeline.cli.curves.scaling_curve import STRONG
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.errors import PlanError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.reporting.report import report
from ridgeline.reporting.terminal.text import warnings
from ridgeline.reporting.terminal.text_intensity import intensity_text
from ridgeline.simulator.layers.intensity import intensities
from ridgeline.simulator.model import setting_of
from ridgeline.workload import Workload


def show_intensity(args: argparse.Namespace, output: Output) -> int:
    """Trace the step of one worker, measure ceilings and links as far as they are not known, show.

    No operator is timed: intensities need none.

    Raises:
        PlanError: fewer than two workers, or they cannot share the batch equally; or a what-if.
        FileFormatError: the file is no machine profile.
        TaskError: the task is unknown.
        WorkloadError: the step cannot be traced.
        LaunchError: a measuring process failed.
    """
    from ridgeline.runtime.training.sampler import check_batch_size

    if args.what_if is not None:
        raise PlanError(
            f"wanted the layers alone, got --what-if {','.join(args.what_if)} with --intensity of one number "
            "of workers; leave one of them out, or give several numbers to --devices"
        )
    task, machine = load(args), profile(args, output)
    if args.devices is not None:
        workers = args.devices[0]
    else:
        # A worker alone sends nothing, so that nothing could be compared.
        workers = max(2, *worker_counts(machine, task.batch_size))
    is_strong = args.scaling == STRONG
    if is_strong:
        check_batch_size(task.batch_size, workers)
    with Heartbeat(output.progress) as heartbeat:
        # Where each worker has a batch of its own, its step is that of one alone.
        count = workers if is_strong else 1
        workload = traced(task, (count,), machine.device_kind, heartbeat)[count]
        if args.machine is None and workers <= machine.num_places:
            machine = _rated(machine, workload, workers, heartbeat)
    found = intensities(workload, workers, machine)
    if args.report is not None:
        output.progress(f"written to {report(args.report, machine=machine, intensities=found)}")
    output.result({"intensity": found}, intensity_text(found), *warnings(workload.notes))
    return FINE


def _rated(machine: Machine, workload: Workload, workers: int, heartbeat: Heartbeat) -> Machine:
    """This machine with the ceilings and collectives of so many workers, in the cluster as described."""
    from ridgeline.probe.measure import measure

    setting = setting_of(machine, workload, Plan(workers=workers))
    with heartbeat.during("measuring"):
        found = measure(settings=(setting,), codecs=False, progress=heartbeat.tell)
    return structs.replace(found, cluster=machine.cluster)
