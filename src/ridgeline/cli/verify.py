"""`ridgeline verify`: does the measured step agree with the predicted one?"""

import argparse
from pathlib import Path
from typing import NamedTuple

from ridgeline.cli.arguments import run_directory
from ridgeline.cli.arguments.inputs import fraction
from ridgeline.cli.command import FINE, NOT_VERIFIED, Output
from ridgeline.errors import FileFormatError
from ridgeline.machine import Machine
from ridgeline.reporting.terminal.text_step import timeline_text, verdict_text
from ridgeline.timeline import Timeline
from ridgeline.verdict import verify
from ridgeline.workload import Workload


class VerifyCommand:
    """Compare two timelines, the predicted first, or judge a run; exit with 3 when they differ too much."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        parser.add_argument(
            "predicted",
            type=Path,
            metavar="A",
            help="timeline file, the prediction; or the directory of a run, which holds all of it",
        )
        parser.add_argument(
            "measured",
            type=Path,
            nargs="?",
            metavar="B",
            help="timeline file, the measurement",
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
        files = _files(args)
        predicted, measured = Timeline.load(files.predicted), Timeline.load(files.measured)
        steps = [
            f"{one.title} with {one.workers} worker{'s' * (one.workers != 1)}"
            for one in (predicted, measured)
        ]
        # Any two may be compared, so that this is no error.
        if steps[0] != steps[1]:
            output.progress(f"! two different steps are compared: {steps[0]}, and {steps[1]}")
        if (files.machine is None) != (files.workload is None):
            given, missing = "--machine", "--workload"
            if files.machine is None:
                given, missing = missing, given
            output.progress(
                f"! {given} shows no causes without {missing}: only the steps are compared"
            )
        expected = Timeline.load(files.expected) if files.expected is not None else predicted
        verdict = verify(
            predicted,
            measured,
            expected=expected,
            machine=Machine.load(files.machine) if files.machine is not None else None,
            workload=Workload.load(files.workload) if files.workload is not None else None,
            tolerance=args.tolerance,
        )
        output.result(verdict, verdict_text(verdict), timeline_text([expected, measured]))
        return FINE if verdict.passed else NOT_VERIFIED


class _Files(NamedTuple):
    """What is compared; None is not there."""

    predicted: Path
    measured: Path
    expected: Path | None = None
    machine: Path | None = None
    workload: Path | None = None


def _files(args: argparse.Namespace) -> _Files:
    """The files that the arguments name, or those of the run whose directory they name.

    Raises:
        FileFormatError: one timeline is named where two are needed.
    """
    first, second = args.predicted, args.measured
    if second is None and first.is_dir():
        return _Files(
            first / run_directory.PREDICTED,
            first / run_directory.MEASURED,
            _if_there(first / run_directory.EXPECTED),
            args.machine or _if_there(first / run_directory.MACHINE),
            args.workload or _if_there(first / run_directory.WORKLOAD),
        )
    if second is None:
        raise FileFormatError(
            f"wanted two timeline files or the directory of a run, got {first} alone; name the measured "
            "timeline as well"
        )
    return _Files(first, second, None, args.machine, args.workload)


def _if_there(path: Path) -> Path | None:
    return path if path.is_file() else None
