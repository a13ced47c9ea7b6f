"""`ridgeline verify`: does the measured step agree with the predicted one?"""

import argparse
from pathlib import Path

from ridgeline.cli.command import FINE, NOT_VERIFIED, Output
from ridgeline.cli.inputs import fraction
from ridgeline.machine import Machine
from ridgeline.reporting.text_step import timeline_text, verdict_text
from ridgeline.timeline import Timeline
from ridgeline.verdict import verify
from ridgeline.workload import Workload


class Command:
    """Compare two timelines, the predicted first; exit with 3 when they differ too much."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        parser.add_argument(
            "predicted", type=Path, metavar="A", help="timeline file, the prediction"
        )
        parser.add_argument(
            "measured", type=Path, metavar="B", help="timeline file, the measurement"
        )
        parser.add_argument(
            "--tolerance",
            type=fraction,
            default=0.15,
            metavar="FRACTION",
            help="largest error of the step that still counts as agreement (default 0.15)",
        )
        parser.add_argument(
            "--machine", type=Path, metavar="FILE", help="machine profile, for the causes"
        )
        parser.add_argument(
            "--workload", type=Path, metavar="FILE", help="workload, for the causes"
        )

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Compare, show."""
        predicted, measured = Timeline.load(args.predicted), Timeline.load(args.measured)
        steps = [
            f"{one.title} with {one.workers} worker{'s' * (one.workers != 1)}"
            for one in (predicted, measured)
        ]
        if steps[0] != steps[1]:
            output.progress(f"! two different steps are compared: {steps[0]}, and {steps[1]}")
        if (args.machine is None) != (args.workload is None):
            given, missing = "--machine", "--workload"
            if args.machine is None:
                given, missing = missing, given
            output.progress(
                f"! {given} tells no causes without {missing}: only the steps are compared"
            )
        verdict = verify(
            predicted,
            measured,
            machine=Machine.load(args.machine) if args.machine is not None else None,
            workload=Workload.load(args.workload) if args.workload is not None else None,
            tolerance=args.tolerance,
        )
        output.result(verdict, verdict_text(verdict), timeline_text([predicted, measured]))
        return FINE if verdict.passed else NOT_VERIFIED
