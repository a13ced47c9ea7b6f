"""`docs/accuracy.md`, written from results: speed, predictions, starts and correctness of every network."""

from collections.abc import Iterator, Sequence

import msgspec

from ridgeline.experiments.networks.result import NetworkResult, NetworksExperiment
from ridgeline.experiments.networks.results.summary import summarise
from ridgeline.experiments.networks.results.text import (
    prediction_grid,
    speed_grid,
    summary_rows,
    tried_grid,
)
from ridgeline.experiments.ways.text import versions_words
from ridgeline.reporting.grid import Grid

HEAD = """# Speed and accuracy on everyday networks

Written by `python benchmarks/networks.py --write-docs`; do not edit. Every network is trained in all forms
in one process, in turns, each form with a model and an optimizer of its own from one seed. *Plain* is what a
user writes: eager or `torch.compile` with its own defaults, both also with a channels-last layout, all with
a fused optimizer where there is one. *By hand* is one CUDA graph around the whole step of any of these.
`auto` is `rl.TrainStep(model, loss_fn, optimizer, plan="auto")`. What `allow` names, all forms may do. On
a CPU it begins without a compiler, and tries what compiles once training has taken as long as that takes,
which the turns do not reach; where a section names `steps`, it was told that so many will be trained.

Predictions are those of every plan that was tried, made before anything was tried. *Expected* is what was
said when training began, of the plan that was chosen, and *trained* what its steps then took, before any
other form was made in the process; *spread*, the distance of the quartiles over the median, is the drift of
the machine itself, as is how far the same eager step is in its trial and in its turns, minutes later. Times
to a plan are those of a new process with empty caches on a machine that was measured before; *again* is the
next process. Ten steps are compared in float32: the largest relative difference of a loss, and that of all
parameters (norm of the gap over the norm). They are equal within 1e-6 on a CPU and 1e-3 on a GPU, or where
they differ by less than four times what a change of the parameters' last bits does to the plain loop itself.
"""
SMALL_NETWORKS = " The networks are small versions: sizes in their titles are those for GPUs."


def page(experiments: Sequence[NetworksExperiment]) -> str:
    """The page for some experiments; those of the same set-up are joined, later networks replace earlier."""
    sections = ("\n".join(_section(experiment)) for experiment in merged(experiments))
    return "\n".join([HEAD, *sections])


def merged(experiments: Sequence[NetworksExperiment]) -> list[NetworksExperiment]:
    """One experiment for each hardware and set-up, in the order in which they come first.

    Networks that failed to run at all (no time left, a package missing) do not replace those that ran; those
    that were ended behind their turns do. What a later result was not asked for stays as it was.
    """
    found: dict[tuple[object, ...], NetworksExperiment] = {}
    for one in experiments:
        key = (one.hardware, one.workers, one.scale, one.allow, one.run_steps)
        if key not in found:
            found[key] = one
            continue
        rows = {row.network: row for row in found[key].networks}
        for row in one.networks:
            if not row.reason or any(form.step_s for form in row.forms):
                timed = msgspec.structs.replace(row, reason="")
                rows[row.network] = _joined(rows.get(row.network), timed)
        found[key] = msgspec.structs.replace(
            one,
            networks=tuple(rows.values()),
            notes=tuple(dict.fromkeys([*found[key].notes, *one.notes])),
        )
    return list(found.values())


def _joined(earlier: NetworkResult | None, later: NetworkResult) -> NetworkResult:
    """A later result with what only the earlier one has: times or a check."""
    if earlier is None or earlier.reason:
        return later
    if not later.forms and (earlier.forms or later.headline is None):
        timed = {"forms": earlier.forms, "headline": earlier.headline, "tried": earlier.tried}
        later = msgspec.structs.replace(later, **timed, starts=earlier.starts)
    if later.starts.compile_s is None and earlier.starts.compile_s is not None:
        later = msgspec.structs.replace(later, starts=earlier.starts)  # those of one run, compared
    if later.check is None:
        later = msgspec.structs.replace(later, check=earlier.check)
    return later


def _section(experiment: NetworksExperiment) -> Iterator[str]:
    ran = tuple(row for row in experiment.networks if not row.reason)
    versions = versions_words(experiment.versions)
    # 0 stands for as many as fill a turn.
    steps = experiment.steps or "some"
    budget_s = experiment.budget_s
    budget = "" if budget_s is None else f"; seconds={budget_s:g} to choose in"
    if experiment.run_steps is not None:
        budget += f"; steps={experiment.run_steps} to be trained"
    yield f"## {experiment.hardware}"
    yield ""
    yield (
        f"Newest run: {experiment.date}; {versions}; allow={experiment.allow!r}; {experiment.turns} turns "
        f"of {steps} steps{budget}.{SMALL_NETWORKS if experiment.scale == 'cpu' else ''}"
    )
    yield ""
    found = tuple(summary_rows(summarise(ran, experiment.allow)))
    yield from _rows(Grid("", ("What", "Figure"), found, right=()))
    yield ""
    for grid in (speed_grid(ran, with_titles=True), prediction_grid(ran), tried_grid(ran)):
        yield from _markdown(grid)
    left_out = [row for row in experiment.networks if row.reason]
    notes = [*experiment.notes, *(f"{row.network}: {row.reason}" for row in left_out)]
    notes += [
        f"{result.network}, {row.form}: {row.reason}"
        for result in ran
        for row in result.forms
        if row.reason
    ]
    if notes:
        yield "Not in the tables, and why:"
        yield ""
        yield from (f"- {_plain_text(note)}" for note in notes)
        yield ""


def _markdown(grid: Grid) -> Iterator[str]:
    """A grid under its title, as Markdown; columns of numbers are set to the right."""
    yield f"{grid.title}:"
    yield ""
    yield from _rows(grid)
    yield ""


def _rows(grid: Grid) -> Iterator[str]:
    yield f"| {' | '.join(grid.head)} |"
    rules = ["---:" if index in grid.numeric else "---" for index in range(len(grid.head))]
    yield f"| {' | '.join(rules)} |"
    for row in grid.rows:
        yield f"| {' | '.join(_plain_text(cell) for cell in row)} |"


def _plain_text(text: str) -> str:
    """One line that is no link and no column."""
    return " ".join(text.split()).replace("|", "\\|").replace("[", "(").replace("]", ")")
