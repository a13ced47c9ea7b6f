"""`ridgeline report`: the pages of a run, made again from its files."""

import argparse
from pathlib import Path

from ridgeline.cli.arguments import run_directory
from ridgeline.cli.arguments.run_directory import if_there
from ridgeline.cli.command import FINE, Output
from ridgeline.errors import FileFormatError
from ridgeline.history import History
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import Candidate, Ranking
from ridgeline.reporting.page.page_plan import GIVEN
from ridgeline.reporting.report import TRACE_NAME, report
from ridgeline.reporting.terminal.text import title, warnings
from ridgeline.reporting.trace_json import write_trace
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict
from ridgeline.workload import Workload

PAGE_NAME = "report.html"


class ReportCommand:
    """Write report.html and trace.json.gz of a run again, from the JSON files in its directory."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        parser.add_argument(
            "run_dir", type=Path, metavar="RUN_DIR", help="directory that train wrote"
        )

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Load what is there, write both files."""
        written = write_report(args.run_dir)
        history = if_there(History, args.run_dir / run_directory.HISTORY)
        outages = () if history is None else history.outages
        output.result(
            {"files": [str(path) for path in written], "outages": [*map(str, outages)]},
            *(title("Wrote", str(path)) for path in written),
            *warnings(map(str, outages)),
        )
        return FINE


def write_report(run_dir: Path) -> list[Path]:
    """Write the trace and the page of a run directory; files that are missing leave their parts out.

    Raises:
        FileFormatError: there is no file of a run, or one of them is damaged.
        OSError: a file cannot be read or written.
    """
    machine = if_there(Machine, run_dir / run_directory.MACHINE)
    workload = if_there(Workload, run_dir / run_directory.WORKLOAD)
    predicted = if_there(Timeline, run_dir / run_directory.PREDICTED)
    expected = corrected(if_there(Timeline, run_dir / run_directory.EXPECTED), predicted)
    measured = if_there(Timeline, run_dir / run_directory.MEASURED)
    verdict = if_there(Verdict, run_dir / run_directory.VERDICT)
    history = if_there(History, run_dir / run_directory.HISTORY)
    ranking = _ranking(run_dir, predicted, measured)
    if not any((machine, workload, predicted, measured, verdict, history, ranking)):
        raise FileFormatError(
            f"wanted the directory of a run, got none of machine.json, workload.json, plan.json, "
            f"predicted.json, measured.json, verdict.json, history.json in {run_dir}; give the directory "
            "that `ridgeline train -o` wrote"
        )
    written = []
    if predicted is not None or measured is not None:
        # What is held against the measurement: the prediction as the trial corrected it.
        written.append(write_trace(run_dir / TRACE_NAME, expected or predicted, measured))
    page = report(
        run_dir / PAGE_NAME,
        machine=machine,
        workload=workload,
        ranking=ranking,
        predicted=predicted,
        expected=expected,
        measured=measured,
        verdict=verdict,
        history=history,
    )
    return [*written, page]


def corrected(expected: Timeline | None, predicted: Timeline | None) -> Timeline | None:
    """What was expected, if that is another than the prediction; runs without a trial expected just that."""
    return None if expected == predicted else expected


def _ranking(
    run_dir: Path, predicted: Timeline | None, measured: Timeline | None
) -> Ranking | None:
    """The saved ranking; for a run whose plan was given, that plan alone."""
    ranking = if_there(Ranking, run_dir / run_directory.RANKING)
    plan = if_there(Plan, run_dir / run_directory.PLAN)
    if ranking is not None or plan is None or predicted is None:
        return ranking
    # As a ranking of one, so that the page has a section for it.
    only = Candidate(plan=plan, timeline=predicted, why=GIVEN, measured=measured)
    # The page shows the model's error, of which the only plan's miss is all that is known.
    miss = abs(predicted.step_ns / measured.step_ns - 1.0) if measured and measured.step_ns else 0.0
    return Ranking(candidates=(only,), error=miss)
