"""What the rows come to: ratios, speed-ups, errors of predictions; pure functions on results."""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ridgeline.experiments.networks.result import AUTO, FAMILIES, Family, NetworkResult, family_of

FIRST_START_SHARE = 1.5
"""Times the first step of `torch.compile` that a first start is measured against: a plan is also traced,
predicted, tried and compared with the step as it was written."""


class Errors(NamedTuple):
    """Errors of predictions as fractions: how many there are, median and 90th percentile."""

    count: int
    median: float
    ninetieth: float


class Waits(NamedTuple):
    """Seconds of networks: how many there are, the median, the most, and the name of that network."""

    count: int
    median: float
    most: float
    network: str


class Summary(NamedTuple):
    """All networks in a few figures; None where no network has what a figure needs.

    Attributes:
        timed: Networks on which `auto` was timed.
        failed: Names of those on which it ended with an error; those that were left out are not among them.
        cut: Names of those on which it chose a plan, and the contest ended before the turns.
        worst_over_plain: Largest time of `auto` over the best plain form, and the network.
        worst_over_hand: The same over the best that is plain or by hand.
        over_plain: Geometric mean of the first.
        over_hand: Geometric mean of the second.
        over_compile: Geometric mean of how many times faster than the compiler's own defaults `auto` is.
        before: Errors before any trial, by family of execution, over all tried plans.
        after: Errors of what was expected when training began, by family of the chosen plan.
        drift: How far an eager step in its trial is from the same step in the turns, minutes later: what the
            machine itself does to a prediction; None where none was timed twice.
        first_start: What a plan takes with empty caches beyond `FIRST_START_SHARE` times the first step of
            the compiler's own defaults; None where no network has both.
        second_start: What it takes once more beyond that step once more.
        unequal: Names of networks whose ten steps differ from the plain loop's.
        checked: Networks that were compared with the plain loop.
    """

    timed: int
    failed: tuple[str, ...]
    cut: tuple[str, ...]
    worst_over_plain: tuple[float, str] | None
    worst_over_hand: tuple[float, str] | None
    over_plain: float | None
    over_hand: float | None
    over_compile: float | None
    before: dict[Family, Errors]
    after: dict[Family, Errors]
    drift: Errors | None
    first_start: Waits | None
    second_start: Waits | None
    unequal: tuple[str, ...]
    checked: int


def summarise(results: Sequence[NetworkResult], allow: Sequence[str] = ()) -> Summary:
    """The figures of some networks, for which all forms were allowed the same."""
    asked = [one for one in results if one.form(AUTO) is not None]
    plain = _ratios((over_plain(one), one.network) for one in results)
    hand = _ratios((over_hand(one), one.network) for one in results)
    compiled = _ratios((times_faster_than_compile(one), one.network) for one in results)
    checked = [one for one in results if one.check is not None]
    return Summary(
        timed=sum(_is_timed(one) for one in asked),
        failed=tuple(one.network for one in asked if not _is_timed(one) and not _was_cut(one)),
        cut=tuple(one.network for one in asked if _was_cut(one)),
        worst_over_plain=max(plain, default=None),
        worst_over_hand=max(hand, default=None),
        over_plain=geometric_mean([ratio for ratio, _ in plain]),
        over_hand=geometric_mean([ratio for ratio, _ in hand]),
        over_compile=geometric_mean([ratio for ratio, _ in compiled]),
        before=_by_family(pair for one in results for pair in _before(one)),
        after=_by_family(pair for one in results for pair in _after(one)),
        drift=errors_of(itertools.chain.from_iterable(_drifts(one, allow) for one in results)),
        first_start=_waits(
            (one.network, one.starts.plan_s, one.starts.compile_s, FIRST_START_SHARE)
            for one in results
        ),
        second_start=_waits(
            (one.network, one.starts.plan_again_s, one.starts.compile_again_s, 1.0)
            for one in results
        ),
        unequal=tuple(one.network for one in checked if one.check and not one.check.is_equal),
        checked=len(checked),
    )


def over_plain(result: NetworkResult) -> float | None:
    """Time of `auto` over the best plain form."""
    best = result.fastest("plain")
    return None if best is None or best.auto_over is None else best.auto_over.value


def over_hand(result: NetworkResult) -> float | None:
    """Time of `auto` over the best form that a script can have: plain, or by hand."""
    rows = [row for row in (result.fastest("plain"), result.fastest("by hand")) if row is not None]
    ratios = [row.auto_over.value for row in rows if row.auto_over is not None]
    return max(ratios, default=None)


def times_faster_than_compile(result: NetworkResult) -> float | None:
    """How many times faster than the compiler's own defaults `auto` is."""
    row = result.compiled
    return None if row is None or row.auto_over is None else 1.0 / row.auto_over.value


def error(predicted_s: float, measured_s: float) -> float:
    """How far off a prediction is, as a fraction of what was measured; above 0 where it is too slow."""
    return predicted_s / measured_s - 1.0


def errors_of(figures: Iterable[float]) -> Errors | None:
    """Median and 90th percentile of absolute errors; None without any.

    Source: the nearest rank, so that both are errors that occurred.
    """
    # By size alone: a prediction that is too fast is as wrong as one that is too slow.
    ordered = sorted(abs(figure) for figure in figures)
    if not ordered:
        return None
    rank = math.ceil(0.9 * len(ordered)) - 1
    return Errors(len(ordered), statistics.median_low(ordered), ordered[rank])


def geometric_mean(figures: Sequence[float]) -> float | None:
    """Of positive figures; None without any."""
    return statistics.geometric_mean(figures) if figures else None


def headline_errors(result: NetworkResult) -> tuple[float | None, float | None]:
    """Of the chosen plan: before any trial, and when training began, against its training steps."""
    told = result.headline
    if told is None or told.trained_s is None:
        return None, None
    trained_s = told.trained_s.value
    return (
        None if told.before_s is None else error(told.before_s, trained_s),
        None if told.expected_s is None else error(told.expected_s, trained_s),
    )


def start_lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """What plans take to choose beside the compiler's own start: what it is, and figures."""
    for what, waits in (
        (
            f"a plan, beyond {FIRST_START_SHARE:g} times the first step of torch.compile",
            summary.first_start,
        ),
        ("a plan again, beyond that step again", summary.second_start),
    ):
        if waits is not None:
            yield (
                what,
                f"median {waits.median:.1f} s, at most {waits.most:.1f} s ({waits.network}) of {waits.count}",
            )


def spread_of(result: NetworkResult) -> float | None:
    """How far apart the quartiles of the training steps are, over their median: the machine's own drift."""
    trained = None if result.headline is None else result.headline.trained_s
    return None if trained is None else trained.spread


def _by_family(pairs: Iterable[tuple[Family, float]]) -> dict[Family, Errors]:
    """Of families of execution and errors; families in their own order."""
    # Read once for each family, which an iterator would not survive.
    found = list(pairs)
    by_family = {f: errors_of(figure for family, figure in found if family == f) for f in FAMILIES}
    return {family: errors for family, errors in by_family.items() if errors is not None}


def _before(result: NetworkResult) -> Iterator[tuple[Family, float]]:
    """Of all tried plans, before any trial."""
    for plan in result.tried:
        if plan.measured_s is not None:
            yield family_of(plan.execution), error(plan.before_s, plan.measured_s)


def _after(result: NetworkResult) -> Iterator[tuple[Family, float]]:
    """Of what was expected when training began."""
    _, after = headline_errors(result)
    if after is not None and result.headline is not None:
        yield family_of(result.headline.execution), after


def _drifts(result: NetworkResult, allow: Sequence[str]) -> Iterator[float]:
    """Of each eager plan of one worker that is a plain form, its trial against its turns."""
    for plan in result.tried:
        # A label begins with the workers; the other words are what differs from the usual step.
        workers, *words = plan.plan.split(", ")
        row = result.form("eager, channels-last" if "channels_last" in words else "eager")
        is_plain = plan.execution == "eager" and ("bf16" in words) == ("bf16" in allow)
        is_alone = workers.startswith("1 worker")
        if plan.measured_s and is_plain and is_alone and row is not None and row.step_s is not None:
            yield error(plan.measured_s, row.step_s.value)


def _waits(starts: Iterable[tuple[str, float | None, float | None, float]]) -> Waits | None:
    """Of names, seconds to a plan, those of the compiler, and how many times those are taken off."""
    found = [
        (plan_s - share * compile_s, network)
        for network, plan_s, compile_s, share in starts
        if plan_s is not None and compile_s is not None
    ]
    if not found:
        return None
    most_s, network = max(found)
    return Waits(
        len(found), statistics.median_low([seconds for seconds, _ in found]), most_s, network
    )


def _is_timed(result: NetworkResult) -> bool:
    row = result.form(AUTO)
    return row is not None and row.step_s is not None


def _was_cut(result: NetworkResult) -> bool:
    row = result.form(AUTO)
    return row is not None and row.was_cut


def _ratios(pairs: Iterable[tuple[float | None, str]]) -> list[tuple[float, str]]:
    return [(ratio, name) for ratio, name in pairs if ratio is not None]
