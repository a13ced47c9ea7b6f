"""`rl.parallelize` as a way to do the work."""

from functools import partial

from ridgeline import units
from ridgeline.experiments.parallel.work import Work
from ridgeline.experiments.ways.case import Way, WayRemarks, WayRunner

NAME = "ridgeline parallelize"


def parallelized(work: Work) -> Way:
    """The function as it is, scheduled by Ridgeline where its inputs are."""
    return Way(NAME, "ridgeline", partial(_make, work))


def _make(work: Work) -> WayRunner:
    from ridgeline.autoparallel.parallelize import parallelize

    program = parallelize(work.fn, work.inputs)

    def remarks() -> WayRemarks:
        report = program.report
        bound = f"no schedule is shorter than {units.seconds(report.bounds.limit_s)}"
        return WayRemarks(notes=(f"chose {report.chosen}: {report.reason}", bound, *report.notes))

    return WayRunner(run=lambda: program(*work.inputs), close=program.close, remarks=remarks)
