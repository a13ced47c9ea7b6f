"""The experiment as text for the terminal: speed, predictions, starts and correctness of each network."""

from collections.abc import Callable, Iterator
from operator import attrgetter

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
from ridgeline.reporting.terminal.text import table, title, warnings

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
    results = experiment.networks
    found = summarise(results, experiment.allow)
    return Group(
        title("Networks", line),
        speed_table(results),
        title("Predictions and starts", "of the plan that was chosen"),
        prediction_table(results),
        title("Every tried plan", "predicted before any trial, after trials, and measured"),
        tried_table(results),
        # Marks are Markdown's, which the page shares these lines with.
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


def speed_table(results: tuple[NetworkResult, ...]) -> RenderableType:
    """Milliseconds of every form, and ratios."""
    rows = table(
        ("Network", "Kind", "eager", "compile", "Best plain", "", "By hand", "auto", "auto/plain",
         "auto/hand", "compile/auto", "Chosen"),
        right=(2, 3, 4, 6, 7, 8, 9, 10),
    )  # fmt: skip
    for result in results:
        if result.reason:
            rows.add_row(
                result.network, result.kind, *[NONE] * 9, Text(result.reason, style="yellow")
            )
            continue
        chosen = "" if result.headline is None else result.headline.execution
        rows.add_row(result.network, result.kind, *speed_cells(result, _cell), chosen)
    return rows


def speed_cells(result: NetworkResult, shown: Callable[[FormRow | None], str]) -> tuple[str, ...]:
    """The times of a network from eager to `auto`, then the ratios; `shown` writes the time of a form."""
    best = result.fastest("plain")
    return (
        shown(result.form("eager") or result.form("DDP")),
        shown(result.compiled),
        shown(best),
        "" if best is None else best.form,
        shown(result.fastest("by hand")),
        shown(result.form(AUTO)),
        ratio(over_plain(result)),
        ratio(over_hand(result)),
        ratio(times_faster_than_compile(result)),
    )


def prediction_table(results: tuple[NetworkResult, ...]) -> RenderableType:
    """What was said of the chosen plan, time to plans, and whether it trains as the plain loop does."""
    rows = table(
        ("Network", "Before", "Expected", "Trained", "Spread", "Error before", "after", "Plan",
         "compile", "Plan again", "compile", "Losses", "Parameters", "10 steps"),
        right=tuple(range(1, 13)),
    )  # fmt: skip
    for result in results:
        if not result.reason:
            rows.add_row(*prediction_cells(result))
    return rows


def prediction_cells(result: NetworkResult) -> tuple[str, ...]:
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


def tried_table(results: tuple[NetworkResult, ...]) -> RenderableType:
    """Every plan that was tried for real."""
    rows = table(
        ("Network", "Plan", "Before", "After", "Measured", "Error before", "after", ""),
        right=(2, 3, 4, 5, 6),
    )
    for result in results:
        for plan in filter(attrgetter("was_begun"), result.tried):
            rows.add_row(result.network, plan.plan, *tried_cells(plan), Text(plan.why_not))
    return rows


def tried_cells(plan: TriedPlan) -> tuple[str, ...]:
    """Predictions and measurement of a plan with both errors."""
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


def _cell(row: FormRow | None) -> str:
    if row is None or row.was_cut:
        return NONE
    return "failed" if row.step_s is None else milliseconds(row.step_s)


def _notes(experiment: NetworksExperiment) -> Iterator[str]:
    yield from experiment.notes
    for result in experiment.networks:
        for row in result.forms:
            if row.reason:
                yield f"{result.network}: {row.form}: {row.reason}"
        for note in result.notes:
            yield f"{result.network}: {note}"
