"""Sections of the report about the choice: the plans that were ranked, and why each knob stands."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.planner import Candidate, Ranking
from ridgeline.planner.labels import label, plan_words
from ridgeline.reporting.labels import as_sentence
from ridgeline.reporting.page.html import Markup, tag
from ridgeline.reporting.page.sections import Bar, bars, grid_box, grid_table, section
from ridgeline.reporting.plan_grids import MOST_PLANS, knobs_grid, plans_grid

MOST_NOTES = 4
GIVEN = "the plan that was given"
"""Why the only candidate of a run stands where it stands if its user gave the plan."""


def plan_section(ranking: Ranking | None) -> Markup | None:
    """Ranking, reasons and the chosen program; None without a ranking."""
    if ranking is None or not ranking.candidates:
        return None
    best = ranking.best
    shown = ranking.candidates[:MOST_PLANS]
    return section(
        "plan",
        "The plan, and what others would cost",
        plan_reading(ranking),
        tag(
            "pre",
            tag("code", repr(best.plan)),
            class_="program",
            tabindex="0",
            aria_label="Chosen plan",
        ),
        bars(plan_bars(shown), label="Predicted time of a step by plan", kind="plans"),
        _legend(ranking),
        _made(shown),
        grid_box(knobs_grid(best.plan.choices, "Every knob")) if best.plan.choices else None,
        tag(
            "details",
            tag("summary", "Reasons for the order"),
            grid_table(plans_grid(ranking.candidates)),
        ),
    )


def plan_reading(ranking: Ranking) -> str:
    """One sentence on how far ahead the chosen plan is, and whether anybody measured it."""
    best, *others = ranking.candidates
    if _is_given(ranking):
        return "The plan was given: nothing was searched or tried."
    tried = sum(candidate.measured is not None for candidate in ranking.candidates)
    count = len(ranking.candidates)
    text = f"{count} plan{'s were' if count > 1 else ' was'} simulated and {tried or 'none'} tried for real"
    rivals = [candidate for candidate in others if not candidate.failure]
    if not rivals:
        return f"{text}; no other was allowed or possible."
    rival = rivals[0]
    # Over the whole run: a faster step may not earn back what was compiled for it.
    if ranking.steps is not None and (best.compile_s or rival.compile_s):
        mine, other = (units.seconds(c.total_s(ranking.steps)) for c in (best, rival))
        return (
            f"{text}; over {ranking.steps} steps, compiling included, the chosen one takes {mine} and the "
            f"next {other}."
        )
    # A measurement is compared with none but another one.
    how = "measured" if best.measured is not None and rival.measured is not None else "predicted"
    mine, other = (_sample_ns(candidate, how) for candidate in (best, rival))
    gap = other / mine - 1 if mine else 0.0
    word = "ahead of" if gap >= 0 else "behind"
    sure = f"; predictions are assumed to be right within {units.percent(ranking.error)}"
    end = sure if how == "predicted" else ""
    apart = _set_apart(best, rival)
    name = f" ({apart})" if apart else ""
    return (
        f"{text}; the chosen one is {units.percent(abs(gap))} {word} the next{name} as {how}"
        f"{_faster_words(best, rivals)}{end}."
    )


def _faster_words(best: Candidate, rivals: Sequence[Candidate]) -> str:
    """How many plans with faster steps stand behind the chosen one for what they take to prepare."""
    mine = _sample_ns(best, "predicted")
    faster = [c for c in rivals if c.compile_s and _sample_ns(c, "predicted") < mine]
    if not faster:
        return ""
    is_, stand = ("is", "stands") if len(faster) == 1 else ("are", "stand")
    return f"; {len(faster)} {is_} predicted faster and {stand} behind it for the time to prepare"


def _set_apart(best: Candidate, candidate: Candidate) -> str:
    """Only what sets a plan apart from the chosen one, as whole labels would look alike."""
    chosen, words = plan_words(best.plan), plan_words(candidate.plan)
    changed = [text for knob, text in words.items() if chosen.get(knob) != text]
    # Buckets are how the same exchange is cut, which is no other way to run.
    changed += [f"no {knob}" for knob in chosen if knob not in words and knob != "buckets"]
    return ", ".join(changed)


def _is_given(ranking: Ranking) -> bool:
    return [candidate.why for candidate in ranking.candidates] == [GIVEN]


def plan_bars(candidates: Sequence[Candidate]) -> list[Bar]:
    """One bar a candidate: predicted time as length, measured time as a tick.

    Lengths are times per sample, as plans may differ in the samples of a step.
    """
    longest = max(
        max(time / max(c.samples, 1) for time in (c.timeline.step_ns, _measured_ns(c)))
        for c in candidates
    )
    best = candidates[0]
    rows = []
    for index, candidate in enumerate(candidates):
        scale = max(candidate.samples, 1) * longest
        measured = candidate.measured
        remark = f"ran {units.nanoseconds(measured.step_ns)}" if measured else ""
        if candidate.compile_s:
            prepared = f"{units.seconds(candidate.compile_s)} to prepare"
            remark = f"{remark}, {prepared}" if remark else prepared
        rows.append(
            Bar(
                name=_set_apart(best, candidate) or "same words" if index else label(best.plan),
                note="" if index else "chosen",
                value=units.nanoseconds(candidate.timeline.step_ns),
                share="failed" if candidate.failure else remark,
                length=candidate.timeline.step_ns / scale,
                mark=measured.step_ns / scale if measured else None,
                colour="@forward" if index == 0 else "@backward",
                is_strong=index == 0,
            )
        )
    return rows


def _sample_ns(candidate: Candidate, how: str) -> float:
    """Time per sample, like compared with like: measured with measured, predicted with predicted."""
    timeline = candidate.measured if how == "measured" else candidate.timeline
    return timeline.step_ns / max(candidate.samples, 1) if timeline is not None else 0.0


def _measured_ns(candidate: Candidate) -> int:
    return candidate.measured.step_ns if candidate.measured is not None else 0


def _legend(ranking: Ranking) -> Markup | None:
    hidden = len(ranking.candidates) - MOST_PLANS
    parts = ["Bar: predicted step."]
    if any(candidate.compile_s for candidate in ranking.candidates):
        parts.append("To prepare: compiling and capturing before the first step, not in the bar.")
    if any(candidate.measured is not None for candidate in ranking.candidates):
        whose = "run" if _is_given(ranking) else "plans that were tried"
        parts.append(f"Tick: measured step of the {whose}.")
    if hidden > 0:
        parts.append(f"{hidden} slower plans are not drawn.")
    parts += [as_sentence(note) for note in ranking.notes[:MOST_NOTES]]
    return tag("p", " ".join(parts), class_="quiet small", style="margin-top:14px")


def _made(candidates: Sequence[Candidate]) -> Markup | None:
    """What the compiler made for the plans that were compiled and tried, where its code was read."""
    lines = [
        tag("li", f"{label(c.plan)}: {c.reading.text}.")
        for c in candidates
        if c.reading is not None and c.measured is not None
    ]
    return tag("ul", *lines, class_="quiet small") if lines else None
