"""`ridgeline scaling`: what runs with several numbers of workers show together."""

import argparse
from pathlib import Path

from ridgeline.cli.arguments import run_directory
from ridgeline.cli.arguments.flags import counts
from ridgeline.cli.arguments.output_file import add_file_argument
from ridgeline.cli.arguments.run_directory import if_there
from ridgeline.cli.command import FINE, Output
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.reporting.report import report
from ridgeline.reporting.scaling_grids import REGIMES, laws_grid, runs_grid
from ridgeline.reporting.terminal.text import grid_text, title, warnings
from ridgeline.timeline import Timeline
from ridgeline.verdict.scaling import scaling
from ridgeline.verdict.scaling_nouns import MeasuredRun
from ridgeline.workload import Workload


class ScalingCommand:
    """Compare runs of one task with several numbers of workers, and fit the laws of scaling to them.

    Speed-up, efficiency and serial part of each run beside its prediction; Amdahl's law where the workers
    share one batch, Gustafson's where each has its own, and the universal scalability law from three
    numbers of workers on, each coefficient with an interval.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        parser.add_argument(
            "run_dirs",
            type=Path,
            nargs="+",
            metavar="RUN_DIR",
            help="directories that train wrote, of at least two numbers of workers",
        )
        parser.add_argument(
            "--devices",
            type=counts,
            default=(),
            metavar="N,...",
            help="further numbers of workers to evaluate the laws at",
        )
        add_file_argument(parser, "also write the result here, as JSON")
        add_file_argument(parser, "also draw it, on an HTML page of its own", "--report")

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Load the runs, fit, show."""
        # All are loaded before any is compared: one that is no run is named at once.
        found = scaling([_load(path) for path in args.run_dirs], args.devices)
        if args.output is not None:
            output.progress(f"written to {found.save(args.output)}")
        if args.report is not None:
            output.progress(f"written to {report(args.report, scaling=found)}")
        laws = laws_grid(found.laws, "Laws")
        output.result(
            found,
            title(f"Scaling of {found.title}", f"measured; {REGIMES[found.regime]}"),
            grid_text(runs_grid(found)),
            grid_text(laws, "through these runs, 90 % intervals"),
            *warnings(found.notes),
        )
        return FINE


def _load(path: Path) -> MeasuredRun:
    """The run in a directory, which needs the file of the step and that of what was measured."""
    needed = (run_directory.WORKLOAD, run_directory.MEASURED)
    run_directory.check_has(path, needed, "train there first, or name another")
    # A run is compared without these, too: only its step and its times are needed.
    machine = if_there(Machine, path / run_directory.MACHINE)
    return MeasuredRun(
        name=str(path),
        workload=Workload.load(path / run_directory.WORKLOAD),
        measured=Timeline.load(path / run_directory.MEASURED),
        predicted=if_there(Timeline, path / run_directory.PREDICTED),
        plan=if_there(Plan, path / run_directory.PLAN),
        fingerprint="" if machine is None else machine.fingerprint,
    )
