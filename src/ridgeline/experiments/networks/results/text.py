"""The experiment as text for the terminal: speed, predictions, starts and correctness of each network."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.experiments.networks.result import (
    AUTO,
    FormRow,
    NetworkResult,
    NetworksExperiment,
    TriedPlan,
)
from ridgeline.experiments.networks.results.summary import (
    Errors,
    Summary,
    error,
    headline_errors,
    over_hand,
    over_plain,
    spread_of,
    start_lines,
    summarise,
    times_faster_than_compile,
)
from ridgeline.experiments.ways.text import versions_words
from ridgeline.machine import Quantity
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.terminal.text import grid_text, title, warnings

NONE = "-"


def _known(show: Callable[[float], str]) -> Callable[[float | None], str]:
    """Shows a figure, where there is one."""
    return lambda figure: NONE if figure is None else show(figure)


seconds = _known(units.seconds)
ratio = _known("{:.2f}".format)
percent = _known("{:+.1%}".format)
"""Of errors, which have a sign."""
share = _known(units.percent)


def experiment_text(experiment: NetworksExperiment) -> RenderableType:
    """All tables, what they come to, and notes."""
    versions = versions_words(experiment.versions)
    allowed = f"allowed: {', '.join(experiment.allow) or 'nothing'}"
    line = f"{experiment.hardware}; {versions}; {allowed}; {experiment.date}"
    results = [result for result in experiment.networks if not result.reason]
    found = summarise(results, experiment.allow)
    grids = speed_grid(results), prediction_grid(results), tried_grid(results)
    return Group(
        title("Networks", line),
        *(grid_text(_narrow(grid)) for grid in grids),
        *(Text(f"{what}: {told}".replace("`", "")) for what, told in summary_rows(found)),
        *([Text(f"not equal: {', '.join(found.unequal)}")] if found.unequal else []),
        *warnings(_notes(experiment)),
    )


def network_line(result: NetworkResult) -> str:
    """One network in a line, for progress."""
    if result.reason:
        return f"{result.network}: {result.reason}"
    row = result.form(AUTO)
    if row is None:
        return f"{result.network}: done in {units.seconds(result.seconds)}"
    # It ran, so that this is no failure of the form.
    if row.was_cut:
        return f"{result.network}: auto chose {_chosen_words(result)}; {row.reason}"
    if row.step_s is None:
        return f"{result.network}: auto failed: {row.reason}"
    words = [f"{result.network}: auto {milliseconds(row.step_s)} ms"]
    best, hand = result.fastest("plain"), result.fastest("by hand")
    if best is not None:
        words.append(f"{ratio(over_plain(result))} x {best.form} ({milliseconds(best.step_s)})")
    if hand is not None and hand.auto_over is not None:
        words.append(f"{ratio(hand.auto_over.value)} x {hand.form} ({milliseconds(hand.step_s)})")
    words.append(f"in {units.seconds(result.seconds)}")
    return ", ".join(words)


def speed_grid(results: Sequence[NetworkResult], *, with_titles: bool = False) -> Grid:
    """Milliseconds a step of every form, and ratios; names of forms are marked as Markdown has it."""
    head = ("Network", "Kind", "eager", "`torch.compile`", "best plain", "", "by hand", "`auto`",
            "`auto` / plain", "`auto` / by hand", "`torch.compile` / `auto`", "chosen")  # fmt: skip
    rows = tuple(
        (
            result.network,
            f"{result.kind}: {result.title}" if with_titles else result.kind,
            *_speed_cells(result),
            "" if result.headline is None else f"`{result.headline.execution}`",
        )
        for result in results
    )
    return Grid("Milliseconds a step", head, rows, right=(2, 3, 4, 6, 7, 8, 9, 10))


def _speed_cells(result: NetworkResult) -> tuple[str, ...]:
    """The times of a network from eager to `auto`, then the ratios."""
    best = result.fastest("plain")
    return (
        _ms(result.form("eager") or result.form("DDP")),
        _ms(result.compiled),
        _ms(best),
        "" if best is None else best.form,
        _ms(result.fastest("by hand")),
        _ms(result.form(AUTO)),
        ratio(over_plain(result)),
        ratio(over_hand(result)),
        ratio(times_faster_than_compile(result)),
    )


def prediction_grid(results: Sequence[NetworkResult]) -> Grid:
    """What was said of the chosen plan, time to plans, and whether it trains as the plain loop does."""
    head = ("Network", "before", "expected", "trained", "spread", "error before", "after", "plan after",
            "`torch.compile` after", "plan again", "`torch.compile` again", "losses", "parameters",
            "ten steps")  # fmt: skip
    rows = tuple(map(_prediction_cells, results))
    title = "Predictions of the chosen plan, and times to a plan"
    return Grid(title, head, rows, right=range(1, 13))


def _prediction_cells(result: NetworkResult) -> tuple[str, ...]:
    """What was said of the chosen plan and what it took, when it was there, and the ten steps."""
    told, starts, check = result.headline, result.starts, result.check
    before, after = headline_errors(result)
    return (
        result.network,
        NONE if told is None else seconds(told.before_s),
        NONE if told is None else seconds(told.expected_s),
        NONE if told is None or told.trained_s is None else seconds(told.trained_s.value),
        share(spread_of(result)),
        percent(before),
        percent(after),
        seconds(starts.plan_s),
        seconds(starts.compile_s),
        seconds(starts.plan_again_s),
        seconds(starts.compile_again_s),
        NONE if check is None else f"{check.losses:.1e}",
        NONE if check is None else f"{check.parameters:.1e}",
        check_word(result),
    )


def tried_grid(results: Sequence[NetworkResult]) -> Grid:
    """Every plan that was tried for real: predictions, measurement, and both errors."""
    head = ("Network", "plan", "before", "after", "measured", "error before", "after", "failure")
    rows = tuple(
        (result.network, plan.plan, *_tried_cells(plan), plan.why_not)
        for result in results
        for plan in result.tried
        if plan.was_begun
    )
    return Grid("Every plan that was tried", head, rows, right=(2, 3, 4, 5, 6))


def _tried_cells(plan: TriedPlan) -> tuple[str, ...]:
    measured = plan.measured_s
    return (
        seconds(plan.before_s),
        seconds(plan.after_s),
        seconds(measured),
        percent(None if measured is None else error(plan.before_s, measured)),
        percent(
            None if measured is None or plan.after_s is None else error(plan.after_s, measured)
        ),
    )


def summary_rows(found: Summary) -> Iterator[tuple[str, str]]:
    """What all networks come to: of what, and the figure."""
    yield "networks timed", str(found.timed)
    if found.failed:
        yield "`auto` failed on", ", ".join(found.failed)
    if found.cut:
        yield "`auto` chose a plan, and no turns were left, on", ", ".join(found.cut)
    for what, worst, mean in (
        ("best plain form", found.worst_over_plain, found.over_plain),
        ("best a script can do", found.worst_over_hand, found.over_hand),
    ):
        if worst is not None:
            yield f"`auto` over the {what}, worst", f"{worst[0]:.3f} ({worst[1]})"
            yield f"`auto` over the {what}, geometric mean", ratio(mean)
    yield "times faster than `torch.compile`, geometric mean", ratio(found.over_compile)
    for when, by_family in (("before any trial", found.before), ("after trials", found.after)):
        for family, errors in by_family.items():
            yield f"error {when}, {family}", errors_words(errors)
    if found.drift is not None:
        yield "an eager step, from its trial to its turns", errors_words(found.drift)
    yield from start_lines(found)
    if found.checked:
        equal = found.checked - len(found.unequal)
        yield "ten steps equal the plain loop's", f"{equal} of {found.checked}"


def errors_words(errors: Errors) -> str:
    """How far predictions were off, in the middle and at the worst tenth."""
    median, ninetieth = units.percent(errors.median), units.percent(errors.ninetieth)
    return f"median {median}, 90th percentile {ninetieth} of {errors.count}"


def check_word(result: NetworkResult) -> str:
    """Whether ten steps equal the plain loop's, in a word."""
    check = result.check
    if check is None:
        return ""
    word = "exact" if check.is_exact else "equal" if check.is_equal else "DIFFERS"
    return f"{word} ({check.execution})"


def milliseconds(figure: Quantity | None) -> str:
    """A time in milliseconds, three digits."""
    return NONE if figure is None else units.digits3(figure.value * 1e3)


def _chosen_words(result: NetworkResult) -> str:
    """The mode that was chosen, and what its steps took alone or in its trial."""
    told = result.headline
    if told is None:
        return "a plan"
    if told.trained_s is not None:
        return f"{told.execution}, {milliseconds(told.trained_s)} ms alone"
    return f"{told.execution}, {seconds(told.expected_s)} in its trial"


def _ms(row: FormRow | None) -> str:
    return NONE if row is None else milliseconds(row.step_s)


def _narrow(grid: Grid) -> Grid:
    """A grid without the marks of Markdown, its titles shortened to what a terminal has room for."""
    head = grid.head
    for long, short in (("`torch.compile`", "compile"), (" after", ""), (" / ", "/"), ("`", "")):
        head = tuple(title.replace(long, short) for title in head)
    rows = tuple(tuple(cell.replace("`", "") for cell in row) for row in grid.rows)
    return grid._replace(head=head, rows=rows)


def _notes(experiment: NetworksExperiment) -> Iterator[str]:
    yield from experiment.notes
    for result in experiment.networks:
        if result.reason:
            yield f"{result.network}: {result.reason}"
        for row in result.forms:
            if row.reason:
                yield f"{result.network}: {row.form}: {row.reason}"
        for note in result.notes:
            yield f"{result.network}: {note}"
