"""Arguments that several verbs share, and what they stand for: a task, its steps, a machine."""

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from ridgeline.cli.command import Output
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.errors import LawError, MachineError
from ridgeline.machine import Machine, Setting
from ridgeline.machine.cluster import Level, parse_cluster
from ridgeline.machine.stragglers import Stragglers, parse_stragglers
from ridgeline.plan import Plan
from ridgeline.planner.doubted import said
from ridgeline.planner.knobs import INEXACT, NO_PRECISION
from ridgeline.simulator.curves.scaling import differing_as_measured
from ridgeline.simulator.model import setting_of
from ridgeline.workload import Workload

if TYPE_CHECKING:
    from ridgeline.runtime.training.task import Task

MEMORY_FORMATS = ("channels_last",)
"""Traced besides the task's own: the search compares them where images are convolved."""
TRACING = "tracing the step"
MOST_COUNTS = 1000
"""Numbers that `...` may stand for: each is simulated, and a table with more is not read."""
MEASURED = "measured"
"""In the place of how devices differ: as their measurements do."""


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted a number of at least 1, got {value}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Numbers of at least 1, for argparse: `1,2,4`, or `1,2,4,...,64`, which continues as it began.

    Example:
        >>> counts("1,2,4,...,20")
        (1, 2, 4, 8, 16, 20)
        >>> counts("2,4,6,...,10")
        (2, 4, 6, 8, 10)
    """
    found: list[int] = []
    parts = text.split(",")
    for index, part in enumerate(parts):
        if part.strip() != "...":
            found.append(positive(part))
            continue
        end = positive(parts[index + 1]) if index + 1 < len(parts) else 0
        if not (len(found) > 1 and found[-2] < found[-1] < end):
            raise argparse.ArgumentTypeError(
                f"wanted two rising numbers before ... and a larger one after it, got {text!r}"
            )
        following = _going_on(found, end)
        if len(following) > MOST_COUNTS:
            raise argparse.ArgumentTypeError(
                f"wanted at most {MOST_COUNTS} numbers in place of ..., got {len(following)} in {text!r}; "
                "begin with numbers that are further apart, or that double"
            )
        found += following
    # Each once, in the order in which they are given.
    return tuple(dict.fromkeys(found))


def _going_on(found: Sequence[int], end: int) -> Sequence[int]:
    """What follows below `end`: 1, 2, 4 doubles, and 2, 4, 6 adds, as the step to the last number shows."""
    before, last = found[-2:]
    rise = last - before
    # A multiple of the number before it cannot rise evenly from a third one, which would be below 1.
    adds = last % before != 0
    return range(last + rise, end, rise) if adds else [*_powers(last, last // before, end)]


def _powers(last: int, factor: int, end: int) -> Iterator[int]:
    while (last := last * factor) < end:
        yield last


def cluster(text: str) -> tuple[Level, ...]:
    """A description of a cluster, for argparse; see `parse_cluster`."""
    try:
        return parse_cluster(text)
    except (LawError, MachineError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def stragglers(text: str) -> Stragglers | str:
    """How devices differ, for argparse: `measured`, or what `parse_stragglers` makes of it."""
    if text == MEASURED:
        return text
    try:
        return parse_stragglers(text)
    except MachineError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def differing(
    machine: Machine, wish: Stragglers | str | None, workload: Workload, plan: Plan
) -> Machine:
    """The machine with devices that differ as that argument says; None leaves what the profile says."""
    if wish is None:
        return machine
    if isinstance(wish, Stragglers):
        return structs.replace(machine, stragglers=wish)
    return differing_as_measured(machine, workload, plan)


def seed(text: str) -> int:
    """A whole number that generators can be seeded with, for argparse."""
    value = _whole(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"wanted a number of 64 bits, got {value}")
    return value


def fraction(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a number above 0, got {text!r}") from None
    # NaN is refused, too: it is not above 0.
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted a number above 0, got {text}")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a whole number, got {text!r}") from None


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """TASK, its data and its batch size."""
    parser.add_argument("task", metavar="TASK", help="built-in name or Python file")
    group = parser.add_argument_group("task")
    group.add_argument("--data", metavar="DIR", help="directory of the task's data")
    group.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="samples per step over all workers together (default: the task's)",
    )


def add_machine_argument(parser: argparse.ArgumentParser) -> None:
    """A saved machine profile instead of this machine."""
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="machine profile (default: measure this machine)",
    )
    parser.set_defaults(cluster=None)  # verbs that take one add the argument


def add_allow_argument(parser: argparse._ActionsContainer) -> None:
    """Changes of the maths that the search may make."""
    parser.add_argument(
        "--allow",
        action="append",
        type=inexact,
        default=[],
        metavar="NAME",
        help=f"a change of the maths that may be chosen, once for each: {', '.join(INEXACT)} (default: none)",
    )


def inexact(text: str) -> str:
    """The name of a change of the maths, for argparse."""
    if text not in INEXACT:
        raise argparse.ArgumentTypeError(
            f"wanted a change of the maths out of {', '.join(INEXACT)}, got {text!r}"
        )
    return text


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
        workloads = traced(task, counts, machine.device_kind, heartbeat, allow)
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
    allow: Collection[str] = (),
) -> dict[int, Workload]:
    """What each worker does, by the number of workers that share the task's batch.

    Args:
        task: Of which a step is traced.
        counts: Numbers of workers.
        device: `cpu` or `cuda`.
        heartbeat: Reports what is under way.
        allow: Changes of the maths that may be made; the step is traced in the precisions among them, too.

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
                precisions=precisions_of(allow),
                memory_formats=MEMORY_FORMATS,
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
        if workers <= num_devices(machine):
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


def num_devices(machine: Machine) -> int:
    """Workers that a machine has room for: its GPUs, or its cores."""
    return machine.num_gpus or machine.host.cores
