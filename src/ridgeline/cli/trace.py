"""`ridgeline trace`: what one training step must do."""

import argparse
from pathlib import Path

from ridgeline.cli.arguments.flags import add_task_arguments, positive
from ridgeline.cli.arguments.inputs import given, load
from ridgeline.cli.arguments.output_file import add_file_argument
from ridgeline.cli.command import FINE, Output
from ridgeline.plan import Plan
from ridgeline.reporting.operators import times_on_machine
from ridgeline.reporting.terminal.text import workload_text
from ridgeline.simulator.model import setting_of


class TraceCommand:
    """List the operators of a training step with FLOP, bytes and intensity; nothing runs.

    With a machine profile the table also says how long each operator takes there and what bounds it.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        add_task_arguments(parser)
        parser.add_argument(
            "--workers",
            type=positive,
            default=1,
            metavar="N",
            help="workers that share the batch (default 1)",
        )
        parser.add_argument(
            "--machine", type=Path, metavar="FILE", help="machine profile, for times and bounds"
        )
        add_file_argument(parser, "also write the workload here")

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Trace, save, show."""
        from ridgeline.tasks.step import step_workload

        machine = None if args.machine is None else given(args.machine, output)
        output.progress(f"tracing a step of {args.task}")
        workload = step_workload(
            load(args), workers=args.workers, device=machine.device_kind if machine else None
        )
        if args.output is not None:
            output.progress(f"wrote {workload.save(args.output)}")
        times = None
        if machine is not None:
            setting = setting_of(machine, workload, Plan(workers=args.workers))
            times = times_on_machine(workload, machine, setting)
        output.result(workload, workload_text(workload, times))
        return FINE
