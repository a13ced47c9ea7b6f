"""`ridgeline verify`: does the measured step agree with the predicted one?"""

import argparse
from pathlib import Path
from typing import NamedTuple

from ridgeline import units
from ridgeline.cli.arguments import run_directory
from ridgeline.cli.arguments.flags import fraction
from ridgeline.cli.arguments.run_directory import if_there
from ridgeline.cli.command import FINE, NOT_VERIFIED, Output
from ridgeline.errors import FileFormatError
from ridgeline.machine import Machine
from ridgeline.reporting.terminal.text_step import timeline_text, verdict_text
from ridgeline.timeline import Timeline
from ridgeline.verdict import TOLERANCE, verify
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
            "measured", type=Path, nargs="?", metavar="B", help="timeline file, the measurement"
        )
        parser.add_argument(
            "--tolerance",
            type=fraction,
            default=TOLERANCE,
            metavar="FRACTION",
            help=f"largest error of the step that still counts as agreement (default {TOLERANCE})",
        )
        parser.add_argument(
            "--machine", type=Path, metavar="FILE", help="machine profile, for the causes"
        )
        parser.add_argument(
            "--workload", type=Path, metavar="FILE", help="workload, for the causes"
        )

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Compare, show."""
        given = _given(args)
        predicted, measured = given.predicted, given.measured
        titles = [
            f"{one.title} with {units.counted(one.workers, 'worker')}"
            for one in (predicted, measured)
        ]
        # Any two may be compared, so that this is no error.
        if titles[0] != titles[1]:
            output.progress(f"! two different steps are compared: {titles[0]}, and {titles[1]}")
        # One of them alone prices no operator.
        if (given.machine is None) != (given.workload is None):
            flags = ["--machine", "--workload"]
            known, missing = flags if given.workload is None else reversed(flags)
            because = f"{known} shows no causes without {missing}"
            if args.measured is None:
                because = (
                    f"no causes without a {missing.removeprefix('--')}.json in {args.predicted}"
                )
            output.progress(f"! {because}: only the steps are compared")
        expected = given.expected or predicted
        verdict = verify(
            predicted,
            measured,
            expected=expected,
            machine=given.machine,
            workload=given.workload,
            tolerance=args.tolerance,
        )
        words = [expected.origin if verdict.expected_ns is None else "expected", measured.origin]
        steps = timeline_text([expected, measured], headings=[*map(str.capitalize, words)])
        output.result(verdict, verdict_text(verdict), steps)
        return FINE if verdict.passed else NOT_VERIFIED


class _Given(NamedTuple):
    """What is compared; None is not there."""

    predicted: Timeline
    measured: Timeline
    expected: Timeline | None
    machine: Machine | None
    workload: Workload | None


def _given(args: argparse.Namespace) -> _Given:
    """What is in the files that the arguments name, or in those of the run whose directory they name."""
    first, second, expected = args.predicted, args.measured, None
    machine = None if args.machine is None else Machine.load(args.machine)
    workload = None if args.workload is None else Workload.load(args.workload)
    if second is None and first.is_dir():
        expected = if_there(Timeline, first / run_directory.EXPECTED)
        machine = machine or if_there(Machine, first / run_directory.MACHINE)
        workload = workload or if_there(Workload, first / run_directory.WORKLOAD)
        # Last: the lines above need the directory itself.
        first, second = _timelines(first)
    if second is None:
        what = f"{first} alone" if first.exists() else f"{first}, which does not exist"
        advice = "name the measured timeline as well" if first.exists() else "check the path"
        raise FileFormatError(
            f"wanted two timeline files or the directory of a run, got {what}; {advice}"
        )
    folder = next((path for path in (first, second) if path.is_dir()), None)
    if folder is not None:
        raise FileFormatError(
            f"wanted two timeline files, got the directory {folder}; name the {run_directory.MEASURED} or "
            f"{run_directory.PREDICTED} in it, or one directory alone to judge that run"
        )
    return _Given(Timeline.load(first), Timeline.load(second), expected, machine, workload)


def _timelines(run_dir: Path) -> tuple[Path, Path]:
    """The files of a finished run that are compared.

    Raises:
        FileFormatError: one of them is not there.
    """
    names = (run_directory.PREDICTED, run_directory.MEASURED)
    instead = "name another, or finish that run with `ridgeline train --resume`"
    run_directory.check_has(run_dir, names, instead)
    return run_dir / names[0], run_dir / names[1]
