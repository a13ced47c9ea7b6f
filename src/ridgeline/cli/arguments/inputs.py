"""What the arguments of a verb stand for: a task, its steps, a machine."""

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from ridgeline.cli.command import Output
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.machine import Machine, Setting
from ridgeline.machine.stragglers import Stragglers
from ridgeline.plan import Plan
from ridgeline.planner.doubted import said
from ridgeline.planner.knobs import NO_PRECISION
from ridgeline.simulator.curves.scaling import differing_as_measured
from ridgeline.simulator.model import setting_of
from ridgeline.workload import Workload

if TYPE_CHECKING:
    from ridgeline.runtime.training.task import Task

MEMORY_FORMATS = ("channels_last",)
"""Traced besides the task's own: the search compares them where images are convolved."""
TRACING = "tracing the step"


def differing(
    machine: Machine, wish: Stragglers | str | None, workload: Workload, plan: Plan
) -> Machine:
    """The machine with devices that differ as that argument says; None leaves what the profile says."""
    if wish is None:
        return machine
    if isinstance(wish, Stragglers):
        return structs.replace(machine, stragglers=wish)
    return differing_as_measured(machine, workload, plan)


def precisions_of(allow: Collection[str]) -> tuple[str, ...]:
    """Those of the allowed changes of the maths that are precisions, each once."""
    return tuple(dict.fromkeys(name for name in allow if name not in NO_PRECISION))


def load(args: argparse.Namespace) -> "Task":
    """The task that the arguments name.

    Raises:
        TaskError: see `load_task`.
        DataError: its data is missing or damaged.
    """
    from ridgeline.tasks.load import load_task

    return load_task(args.task, data_dir=args.data, batch_size=args.batch_size)


def describe(
    args: argparse.Namespace,
    output: Output,
    *,
    wished: int | None = None,
    most: int | None = None,
    allow: Collection[str] = (),
) -> tuple[Machine, dict[int, Workload]]:
    """The machine that the arguments name (else this one), and the step at every number of workers.

    This machine is measured as far as it is not known yet: at the numbers of workers that it has room
    for, with the operators of the step.

    Args:
        args: The parsed command line.
        output: Takes lines of progress.
        wished: See `worker_counts`.
        most: See `worker_counts`.
        allow: Changes of the maths that may be made; the step is traced in the precisions among them, too.

    Raises:
        PlanError: the batch cannot be shared equally by the wished number of workers.
        FileFormatError: the file is no machine profile.
        TaskError: the task is unknown or its batch too small.
        WorkloadError: the step cannot be traced.
        LaunchError: a measuring process failed.
    """
    task = load(args)
    machine = profile(args, output)
    counts = worker_counts(machine, task.batch_size, wished=wished, most=most)
    with Heartbeat(output.progress) as heartbeat:
        workloads = traced(task, counts, machine.device_kind, heartbeat, precisions_of(allow))
        # A profile that was given may be another machine's, of which measuring here says nothing.
        if args.machine is None:
            machine = measured_for(machine, workloads, heartbeat)
    return machine, workloads


def profile(args: argparse.Namespace, output: Output) -> Machine:
    """The machine that the arguments name, else what is known of this one, in the cluster that they describe.

    Of a profile that was given, `output` takes what a user should know: nothing measures it again.

    Raises:
        FileFormatError: the file is no machine profile.
    """
    from ridgeline.probe.measure import measure

    machine = measure(settings=()) if args.machine is None else given(args.machine, output)
    return machine if args.cluster is None else structs.replace(machine, cluster=args.cluster)


def given(path: Path, output: Output) -> Machine:
    """The profile in a file; `output` takes what makes it doubtful.

    Raises:
        FileFormatError: the file is no machine profile.
    """
    machine = Machine.load(path)
    for line in said(machine):
        output.progress(f"{path}: {line}")
    return machine


def traced(
    task: "Task",
    counts: Collection[int],
    device: str,
    heartbeat: Heartbeat,
    precisions: Collection[str] = (),
    memory_formats: Collection[str] = MEMORY_FORMATS,
) -> dict[int, Workload]:
    """What each worker does, by the number of workers that share the task's batch.

    The step is traced as the task has it, and in those precisions and memory formats.

    Raises:
        TaskError: its batch is too small.
        WorkloadError: the step cannot be traced.
    """
    from ridgeline.tasks.step import step_workload

    of_whom = ", ".join(map(str, counts)) + " worker" + "s" * (tuple(counts) != (1,))
    heartbeat.tell(f"tracing a step of {task.name} for {of_whom}")
    with heartbeat.during(TRACING):
        return {
            count: step_workload(
                task,
                workers=count,
                device=device,
                precisions=precisions,
                memory_formats=memory_formats,
                may_run=True,
            )
            for count in counts
        }


def measured_for(
    machine: Machine, workloads: Mapping[int, Workload], heartbeat: Heartbeat
) -> Machine:
    """This machine, measured for each number of workers that it has room for, in the cluster as described.

    Raises:
        LaunchError: a measuring process failed.
    """
    for workers, workload in workloads.items():
        # What has no room here cannot be measured here, and is predicted from what can.
        if workers <= machine.num_places:
            setting = setting_of(machine, workload, Plan(workers=workers))
            found = measured(workload, setting, heartbeat)
            # The cache knows this host alone; what joins it to others comes from the arguments.
            machine = structs.replace(found, cluster=machine.cluster)
    for line in said(machine):
        heartbeat.tell(line)
    return machine


def measured(
    workload: Workload,
    setting: Setting,
    heartbeat: Heartbeat,
    *,
    codecs: bool = True,
    refresh: bool = False,
) -> Machine:
    """This machine, measured as far as its saved profile lacks what a step needs, with signs of life.

    Raises:
        LaunchError: a measuring process failed.
    """
    from ridgeline.probe.measure import measure, missing_seconds

    missing_s = missing_seconds(workload, (setting,), codecs=codecs, refresh=refresh)
    with heartbeat.during("measuring", missing_s):
        return measure(
            workload=workload,
            settings=(setting,),
            codecs=codecs,
            refresh=refresh,
            progress=heartbeat.tell,
        )


def worker_counts(
    machine: Machine,
    batch_size: int,
    *,
    wished: int | None = None,
    most: int | None = None,
    threads: int | None = None,
) -> tuple[int, ...]:
    """Numbers of workers to compare: 1, 2, 4 ... and the largest, as far as they share the batch equally.

    Args:
        machine: Its room is the default for the largest: as many workers as it has GPUs, or cores for
            `threads` each, and no more than are measured unasked.
        batch_size: Samples per step over all workers together.
        wished: The largest number, which must share the batch.
        most: The largest number if it shares the batch; else one below it is the largest.
        threads: Cores that each worker takes.

    Raises:
        PlanError: the batch cannot be shared equally by the wished number.
    """
    from ridgeline.probe.measure import MOST_WORKERS
    from ridgeline.runtime.training.sampler import check_batch_size

    if wished is not None:
        check_batch_size(batch_size, wished)
    room = machine.num_gpus or machine.host.cores // (threads or 1)
    largest = wished or most or max(1, min(room, MOST_WORKERS))
    counts = {1 << power for power in range(largest.bit_length())} | {largest}
    return tuple(sorted(count for count in counts if batch_size % count == 0))
