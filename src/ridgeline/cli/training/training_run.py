"""The beginning and the end of a training run: its files, the plan shown, its verdict and its report."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.cli.arguments import run_directory
from ridgeline.cli.command import FINE, Output
from ridgeline.cli.report import PAGE_NAME, write_report
from ridgeline.cli.training.decision import Decision
from ridgeline.cli.training.order import Order
from ridgeline.cli.training.worker import TrainRequest
from ridgeline.errors import RidgelineError
from ridgeline.history import History, metric_text
from ridgeline.planner.labels import label
from ridgeline.reporting.terminal.text import ranking_text, title, warnings
from ridgeline.reporting.terminal.text_step import verdict_text
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict, verify

if TYPE_CHECKING:
    from ridgeline.runtime.training.task import Task


NOTABLE = 0.1
"""Differences below this are the ordinary spread of steps on a quiet machine."""
FAR = 1.5
"""A factor by which the model alone is never off on a machine that its profile describes."""


def num_steps(task: "Task", epochs: int, *, workers: int = 1) -> int:
    """Steps of a whole run, as training counts them with so many workers.

    Raises:
        DataError: the training data is empty or has no length.
    """
    from ridgeline.runtime.training import sampler

    count = sampler.length(task.train_data, "training data")
    each = sampler.num_steps(count, batch_size=task.batch_size, workers=workers)
    return max(1, each * epochs)


def prepare(order: Order, decision: Decision, output: Output) -> Path:
    """Write down what was decided and what the workers are to do, and show the plan.

    Returns:
        The workers' request. That of a resumed run lies beside the one before until it was taken up.

    Raises:
        OSError: the run directory cannot be written.
    """
    run_dir = Path(order.run_dir)
    decision.machine.save(run_dir / run_directory.MACHINE)
    decision.workload.save(run_dir / run_directory.WORKLOAD)
    decision.plan.save(run_dir / run_directory.PLAN)
    decision.predicted.save(run_dir / run_directory.PREDICTED)
    decision.expected.save(run_dir / run_directory.EXPECTED)
    if decision.ranking is not None:
        decision.ranking.save(run_dir / run_directory.RANKING)
        # As JSON one document is printed, when all is over.
        if not output.is_json:
            output.result({}, ranking_text(decision.ranking))
    name = run_directory.PENDING if order.resume else run_directory.REQUEST
    request = order.request(decision.plan, decision.workload.device).save(run_dir / name)
    output.progress(f"training with {label(decision.plan)} into {run_dir}")
    return request


def limit_samples_per_s(decision: Decision) -> float | None:
    """Samples per second at the physical limit of the step, over all workers."""
    # Against itself, since nothing but its limit is wanted.
    ideal = verify(
        decision.predicted, decision.predicted, machine=decision.machine, workload=decision.workload
    )
    if not ideal.share_of_ceiling:
        return None
    limit_s = ideal.share_of_ceiling * ideal.measured_ns * 1e-9
    return decision.workload.samples * decision.plan.workers / limit_s


def conclude(run_dir: Path, task: str, decision: Decision, output: Output) -> int:
    """Verify, report, and show how it went; a missed prediction is reported, not punished."""
    if not (run_dir / run_directory.MEASURED).is_file():
        return _conclude_unmeasured(run_dir, task, output)
    trial = decision.ranking.best.measured if decision.ranking else None
    measured = with_drift(Timeline.load(run_dir / run_directory.MEASURED), trial)
    measured = with_stale_profile(measured, trial, decision.predicted)
    measured = _with_changed_task(measured, TrainRequest.load(run_dir / run_directory.REQUEST))
    # With its notes, so that a report that is written later has them, too.
    measured.save(run_dir / run_directory.MEASURED)
    history = History.load(run_dir / run_directory.HISTORY)
    verdict = verify(
        decision.predicted,
        measured,
        expected=decision.expected,
        machine=decision.machine,
        workload=decision.workload,
    )
    verdict.save(run_dir / run_directory.VERDICT)
    page = _write_pages(run_dir)
    overhead_ns = measured.counters.get("overhead_ns")
    output.result(
        {
            "run_dir": str(run_dir),
            "task": task,
            "metric": history.epochs[-1].metric,
            "predicted_ns": verdict.predicted_ns,
            "measured_ns": verdict.measured_ns,
            "expected_ns": decision.expected.step_ns,
            "error": verdict.error,
            "error_before": verdict.error_before,
            "overhead_ns": overhead_ns,
            "report": str(page),
        },
        *_summary(task, history, verdict, overhead_ns, page),
    )
    return FINE


def _conclude_unmeasured(run_dir: Path, task: str, output: Output) -> int:
    """Report a run that was killed after its last step, with what was measured of its steps."""
    history = History.load(run_dir / run_directory.HISTORY)
    page = _write_pages(run_dir)
    metric = history.epochs[-1].metric
    output.result(
        {"run_dir": str(run_dir), "task": task, "metric": metric, "report": str(page)},
        _done(task, history),
        *warnings(map(str, history.outages)),
        Text(
            "no verdict: the run was killed after its last step, before it wrote down what that took"
        ),
        Text(f"report: {page}"),
    )
    return FINE


def _write_pages(run_dir: Path) -> Path:
    """Write the trace and the page of a run that is over, and return the page's path.

    Raises:
        RidgelineError: they cannot be written; the run lacks nothing else.
    """
    try:
        write_report(run_dir)
    except OSError as error:
        raise RidgelineError(
            f"wanted to write the pages of the run in {run_dir}, which is trained to its end, got "
            f"{error.strerror or error} ({error.filename}); make room, and run `ridgeline report {run_dir}`"
        ) from error
    return run_dir / PAGE_NAME


# A trial and the run execute the same plan on the same machine. What they differ by is no error of the model:
# the machine itself was slower or faster meanwhile (other programs, throttling, neighbours on a shared host).
# Nor is it the model's where the profile was measured in another hour: then trial and run agree, and both
# differ from it. The verdict says so, instead of leaving the reader to guess.
def with_stale_profile(measured: Timeline, trial: Timeline | None, predicted: Timeline) -> Timeline:
    """The measured timeline, with a note when trial and run both say that the profile is not of now."""
    if trial is None or not (trial.step_ns and measured.step_ns):
        return measured
    ratios = [predicted.step_ns / step_ns for step_ns in (trial.step_ns, measured.step_ns)]
    # Both, and to the same side: a single measurement may have been disturbed.
    if not (min(ratios) > FAR or max(ratios) < 1.0 / FAR):
        return measured
    note = (
        f"trial ({units.nanoseconds(trial.step_ns)}) and run ({units.nanoseconds(measured.step_ns)}) agree "
        f"that the saved profile ({units.nanoseconds(predicted.step_ns)} predicted) does not describe this "
        "machine as it is now: measure again with ridgeline measure --refresh"
    )
    return msgspec.structs.replace(measured, notes=(note, *measured.notes))


def with_drift(measured: Timeline, trial: Timeline | None) -> Timeline:
    """The measured timeline, with a note when its step differs notably from that of the trial."""
    if trial is None or not trial.step_ns:
        return measured
    ratio = measured.step_ns / trial.step_ns
    if abs(ratio - 1.0) <= NOTABLE:
        return measured
    pace = "slower" if ratio > 1.0 else "faster"
    note = (
        f"the machine was {pace} during the run than when the plan was tried: "
        f"{units.nanoseconds(measured.step_ns)} a step against {units.nanoseconds(trial.step_ns)} for the "
        "same plan"
    )
    return msgspec.structs.replace(measured, notes=(*measured.notes, note))


def _with_changed_task(measured: Timeline, request: TrainRequest) -> Timeline:
    """The measured timeline, with a note when no single text of the task file made the run."""
    if not request.is_task_changed:
        return measured
    note = f"{request.job.task} was changed before the run was resumed: its parts were trained by other code"
    return msgspec.structs.replace(measured, notes=(note, *measured.notes))


def _summary(
    task: str, history: History, verdict: Verdict, overhead_ns: float | None, page: Path
) -> list[RenderableType]:
    overhead = "not measured" if overhead_ns is None else f"{units.nanoseconds(overhead_ns)} a step"
    if verdict.hides_overhead:
        overhead += " on the host, hidden behind the device"
    return [
        _done(task, history),
        verdict_text(verdict),
        *warnings(map(str, history.outages)),
        Text(verdict.outlook),
        Text(f"Ridgeline's own time: {overhead}"),
        Text(f"report: {page}"),
    ]


def _done(task: str, history: History) -> RenderableType:
    """The headline of a run."""
    last = history.epochs[-1]
    metric = metric_text(last.metric, (point.metric for point in history.epochs))
    return title(task, f"test metric {metric} after {units.counted(last.epoch + 1, 'epoch')}")
