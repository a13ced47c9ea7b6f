"""Sections of the report about the result: the verdict, and the way from the limit to the step."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.reporting.labels import as_sentence
from ridgeline.reporting.page.html import Content, Markup, join, tag
from ridgeline.reporting.page.sections import Bar, bars, bound_units, section
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict, step_drift, step_spread
from ridgeline.verdict.verify import hides_overhead
from ridgeline.verdict.waterfall import BETWEEN, EXPOSED, IDEAL, INPUT, KERNEL, LAUNCH, MEMORY
from ridgeline.workload import Workload

MOST_NOTES = 5
"""Notes shown at once."""


def verdict_section(
    verdict: Verdict | None,
    predicted: Timeline | None,
    measured: Timeline | None,
    workload: Workload | None,
    expected: Timeline | None = None,
) -> Markup | None:
    """The card on top: verdict, why, next, and the numbers; None without verdict or timeline."""
    if verdict is None and predicted is None and measured is None:
        return None
    parts: list[Content] = []
    if verdict is not None:
        pill = "pill" if verdict.passed else "pill bad"
        parts += [
            tag("span", "Prediction holds" if verdict.passed else "Prediction is off", class_=pill),
            tag("h2", bound_units(verdict.verdict), class_="line", id="verdict-title"),
            tag(
                "dl",
                tag("div", tag("dt", "Why"), tag("dd", bound_units(as_sentence(verdict.why)))),
                tag("div", tag("dt", "Next"), tag("dd", bound_units(as_sentence(verdict.next)))),
                tag(
                    "div", tag("dt", "Model"), tag("dd", bound_units(as_sentence(verdict.outlook)))
                ),
                class_="whynext",
            ),
        ]
    else:
        parts.append(tag("h2", _headline(predicted, measured), class_="line", id="verdict-title"))
    timelines = [t for t in (predicted, measured) if t is not None]
    if timelines:
        parts.append(bars(step_bars(timelines, expected), label="Time of a step"))
    tiles = result_tiles(verdict, predicted, measured, workload)
    parts.append(tag("dl", *(_tile(*tile) for tile in tiles), class_="tiles"))
    # A verdict has those of its timelines among its own.
    notes = verdict.notes if verdict is not None else [n for t in timelines for n in t.notes]
    parts.append(_notes(tuple(dict.fromkeys(notes))))
    return tag("section", *parts, class_="verdict", id="verdict", aria_labelledby="verdict-title")


def _notes(notes: Sequence[str]) -> Markup | None:
    """The first notes in sight, the rest behind a click."""
    if not notes:
        return None
    # What the run could not do as planned comes first among them.
    first, rest = notes[:MOST_NOTES], notes[MOST_NOTES:]
    shown = tag("ul", *(tag("li", as_sentence(note)) for note in first), class_="notes")
    if not rest:
        return shown
    more = tag("ul", *(tag("li", as_sentence(note)) for note in rest), class_="notes")
    return join((shown, tag("details", tag("summary", f"{len(rest)} more notes"), more)))


def step_bars(timelines: Sequence[Timeline], expected: Timeline | None = None) -> list[Bar]:
    """Predicted and measured step on one scale, between them what was expected after a trial."""
    named = [(timeline.origin.capitalize(), timeline) for timeline in timelines]
    if expected is not None:
        after = sum(timeline.origin == "predicted" for timeline in timelines)
        # Between the two that it stands between in time: it corrects one and is held against the other.
        named.insert(after, ("Expected after a trial", expected))
    longest = max(timeline.step_ns for _, timeline in named) or 1
    return [
        Bar(
            name=name,
            value=units.nanoseconds(timeline.step_ns),
            length=timeline.step_ns / longest,
            colour="@forward" if timeline.origin == "measured" else "@backward",
            is_strong=timeline.origin == "measured",
        )
        for name, timeline in named
    ]


def result_tiles(
    verdict: Verdict | None,
    predicted: Timeline | None,
    measured: Timeline | None,
    workload: Workload | None,
) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the numbers below the verdict."""
    tiles: list[tuple[str, str, str]] = []
    step = measured or predicted
    if step is not None and workload is not None and step.step_ns:
        # Of all workers, each of which has the samples of one.
        rate = workload.samples * step.workers / (step.step_ns * 1e-9)
        tiles.append(
            (
                "Throughput",
                f"{units.digits3(rate)} /s",
                f"samples, {units.counted(step.workers, 'worker')}",
            )
        )
    if verdict is not None:
        within = f"tolerance {units.percent(verdict.tolerance)}"
        if verdict.error_before is not None:
            within += f"; {100 * verdict.error_before:+.1f} % before any trial"
        tiles.append(("Prediction error", f"{100 * verdict.error:+.1f} %", within))
        if verdict.share_of_ceiling is not None:
            share = units.percent(verdict.share_of_ceiling)
            tiles.append(("Share of the ceiling", share, "limit / measured step"))
    if measured is not None:
        count = len(measured.steps_ns)
        if count > 1:
            remark = f"quartiles, {count} steps"
            drift = step_drift(measured)
            if drift is not None:
                remark += f"; drift {100 * drift:+.1f} %"
            tiles.append(("Spread of the step", units.percent(step_spread(measured)), remark))
        overhead = measured.counters.get("overhead_ns")
        if overhead is not None and measured.step_ns:
            remark = f"{100 * overhead / measured.step_ns:.2g} % of a step"
            if hides_overhead(measured):
                remark = "a step on the host, hidden behind the device"
            tiles.append(("Ridgeline's overhead", units.nanoseconds(overhead), remark))
    return tiles


WATERFALL_COLOURS = {
    IDEAL: "@forward",
    MEMORY: "@normalization",
    KERNEL: "@backward",
    LAUNCH: "@optimizer",
    EXPOSED: "@wait",
    INPUT: "@input",
    BETWEEN: "@input",
}


def waterfall_section(verdict: Verdict | None) -> Markup | None:
    """The parts of the step, adding up from the physical limit; None without them."""
    if verdict is None or not verdict.waterfall:
        return None
    return section(
        "waterfall",
        "From the physical limit to the measured step",
        waterfall_reading(verdict),
        bars(waterfall_bars(verdict), label="Parts of the measured step", kind="waterfall"),
    )


def waterfall_reading(verdict: Verdict) -> str:
    """One sentence on the limit and the largest loss."""
    total = verdict.measured_ns
    parts = verdict.waterfall
    whole = units.nanoseconds(total)
    text = f"The step takes {whole}"
    if verdict.share_of_ceiling is not None:
        limit = units.nanoseconds(verdict.share_of_ceiling * total)
        share = units.percent(verdict.share_of_ceiling)
        text = f"Of {whole} the machine needs {limit} ({share}) even when nothing is lost"
    # The physical limit is no loss, and moving bytes is a part of it.
    losses = [part for part in parts if part.ns > 0 and part.name not in (IDEAL, MEMORY)]
    if not losses:
        return f"{text}; nothing is lost."
    worst = max(losses, key=lambda part: part.ns)
    size = f"{units.nanoseconds(worst.ns)} ({units.percent(worst.ns / total)})"
    return f"{text}; the largest loss is {worst.name}, {size}."


def waterfall_bars(verdict: Verdict) -> list[Bar]:
    """One floating bar a part, each from where the last one ended, and the sum."""
    total = verdict.measured_ns or 1
    rows: list[Bar] = []
    reached = 0
    for part in verdict.waterfall:
        rows.append(
            Bar(
                name=part.name[:1].upper() + part.name[1:],
                note=part.why,
                value=units.nanoseconds(part.ns),
                share=units.percent(part.ns / total),
                start=reached / total,
                length=part.ns / total,
                colour=WATERFALL_COLOURS.get(part.name, "@other"),
            )
        )
        reached += part.ns
    rows.append(
        Bar(
            name="Measured step",
            value=units.nanoseconds(total),
            share="100 %",
            length=1.0,
            colour="@ink",
            is_strong=True,
            is_ruled=True,
        )
    )
    return rows


def _tile(name: str, value: str, remark: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, tag("small", remark)))


def _headline(predicted: Timeline | None, measured: Timeline | None) -> str:
    timeline = measured or predicted
    assert timeline is not None
    verb = "takes" if timeline.origin == "measured" else "should take"
    return f"A step {verb} {units.nanoseconds(timeline.step_ns)}."
