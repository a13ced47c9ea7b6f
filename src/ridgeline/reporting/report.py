"""`report`: everything known about a run as one HTML file that needs no network.

Order of the page: the verdict, the distance from the physical limit, both timelines, the roofline,
the plans, training, scaling (measured, then predicted), layers on the wire, time per frame, memory, the
machine, and the data. A part that was not given leaves its sections out.
"""

from pathlib import Path
from typing import NamedTuple

from plotly.offline import get_plotlyjs

from ridgeline import units
from ridgeline.codec import VERSION, Noun, write_atomically
from ridgeline.errors import RidgelineError
from ridgeline.given import checked
from ridgeline.history import History
from ridgeline.machine import Machine, Setting
from ridgeline.plan import Plan
from ridgeline.planner import Ranking
from ridgeline.reporting.labels import settings_of
from ridgeline.reporting.operators import OpGroup, group_ops, times_from_timeline, times_on_machine
from ridgeline.reporting.page.html import Markup, asset, join, tag
from ridgeline.reporting.page.page_intensity import intensity_section
from ridgeline.reporting.page.page_machine import data_section, machine_section, training_section
from ridgeline.reporting.page.page_plan import plan_section
from ridgeline.reporting.page.page_result import verdict_section, waterfall_section
from ridgeline.reporting.page.page_scaling import predicted_scaling_section, scaling_section
from ridgeline.reporting.page.page_step import (
    frames_section,
    memory_section,
    roofline_section,
    timeline_section,
)
from ridgeline.simulator.layers.intensity import Intensities
from ridgeline.simulator.pricing.settings import nearest_setting
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict
from ridgeline.verdict.predicted_scaling import PredictedScaling
from ridgeline.verdict.scaling_nouns import MeasuredScaling
from ridgeline.workload import Workload

TRACE_NAME = "trace.json.gz"
"""The trace that the page links to when it lies in the same folder."""

_NAVIGATION = {
    "verdict": "Verdict",
    "waterfall": "Distance",
    "timeline": "Timeline",
    "roofline": "Roofline",
    "plan": "Plan",
    "training": "Training",
    "scaling": "Scaling",
    "predicted-scaling": "Predicted scaling",
    "intensity": "Layers",
    "frames": "Frames",
    "memory": "Memory",
    "machine": "Machine",
    "data": "Data",
}
# The browser itself then refuses whatever would leave the file.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_LOGO = Markup(
    '<svg width="26" height="18" viewBox="0 0 26 18" fill="none" aria-hidden="true">'
    '<path d="M1.5 16.5 11 4h13.5" stroke="currentColor" stroke-width="2.4" stroke-linecap="round" '
    'stroke-linejoin="round"/><circle cx="11" cy="4" r="2.9" fill="var(--communication)"/></svg>'
)


@checked(RidgelineError)
def report(
    path: str | Path,
    *,
    machine: Machine | None = None,
    workload: Workload | None = None,
    ranking: Ranking | None = None,
    predicted: Timeline | None = None,
    expected: Timeline | None = None,
    measured: Timeline | None = None,
    verdict: Verdict | None = None,
    history: History | None = None,
    scaling: MeasuredScaling | None = None,
    predicted_scaling: PredictedScaling | None = None,
    intensities: Intensities | None = None,
) -> Path:
    """Write the report of a run to `path` and return the path.

    The file holds its style, its script, its charts library and the raw values; it opens offline, in
    light and dark, and prints. Written atomically.

    Args:
        path: HTML file to write; a `trace.json.gz` in the same folder is linked.
        machine: What the hardware can do.
        workload: What the step must do.
        ranking: The plans that were compared, best first.
        predicted: Timeline of the simulator.
        expected: The same after the plan's trial; its frames are then compared with the measured ones.
        measured: Timeline of the run.
        verdict: Comparison of both.
        history: The course of the training.
        scaling: Runs with several numbers of workers, and the laws through them.
        predicted_scaling: What was predicted for several numbers of workers.
        intensities: What each layer sends, shared by samples or by columns.

    Raises:
        RidgelineError: nothing was given.
        OSError: the file cannot be written.

    Cost: about 5 MB on disk, most of it the charts library.
    """
    timelines = (predicted, expected, measured)
    curves = (scaling, predicted_scaling, intensities)
    given = _Given(verdict, *timelines, ranking, workload, machine, history, *curves)
    nouns = given._asdict()
    if not any(noun is not None for noun in nouns.values()):
        raise RidgelineError(
            f"wanted at least one value to report on, got none for {path}; "
            "give report a machine, workload, ranking, timeline, verdict, history or scaling"
        )
    target = Path(path)
    # A link to what is not there would fail when somebody follows it.
    trace_name = TRACE_NAME if (target.parent / TRACE_NAME).exists() else None
    sections = _sections(given) | {"data": data_section(nouns, trace_name)}
    drawn = {name: content for name, content in sections.items() if content is not None}
    page = _page(_title(nouns), _subtitle(machine, workload, measured or predicted), drawn)
    write_atomically(target, page.encode("utf-8"))
    return target


class _Given(NamedTuple):
    """What there is to report on, in the order in which it can be saved from the page."""

    verdict: Verdict | None
    predicted: Timeline | None
    expected: Timeline | None
    measured: Timeline | None
    ranking: Ranking | None
    workload: Workload | None
    machine: Machine | None
    history: History | None
    scaling: MeasuredScaling | None
    predicted_scaling: PredictedScaling | None
    intensities: Intensities | None


def _sections(given: _Given) -> dict[str, Markup | None]:
    """The sections in their order; None where nothing was given for one."""
    machine, workload, predicted = given.machine, given.workload, given.predicted
    measured, verdict = given.measured, given.verdict
    setting = setting_of(machine, workload, given.ranking, measured or predicted)
    groups = _groups(workload, machine, setting, predicted)
    # The measurement is held against what was expected when training began.
    judged = given.expected or predicted
    word = "predicted" if given.expected is None else "expected"
    # Where nobody judged, that of `verify`.
    tolerance = verdict.tolerance if verdict is not None else 0.15
    return {
        "verdict": verdict_section(verdict, predicted, measured, workload, given.expected),
        "waterfall": waterfall_section(verdict),
        "timeline": timeline_section(judged, measured, word),
        "roofline": roofline_section(machine, setting, groups),
        "plan": plan_section(given.ranking),
        "training": training_section(given.history),
        "scaling": scaling_section(given.scaling),
        "predicted-scaling": predicted_scaling_section(given.predicted_scaling),
        "intensity": intensity_section(given.intensities),
        "frames": frames_section(judged, measured, tolerance, word),
        "memory": memory_section(workload, machine, setting, predicted),
        "machine": machine_section(machine, setting),
    }


def setting_of(
    machine: Machine | None,
    workload: Workload | None,
    ranking: Ranking | None,
    timeline: Timeline | None,
) -> Setting | None:
    """The setting of the profile that is most like that of the reported step; None without any."""
    if machine is None:
        return None
    device = workload.device if workload is not None else machine.device_kind
    plan = ranking.best.plan if ranking is not None and ranking.candidates else Plan()
    workers = timeline.workers if timeline is not None else plan.workers
    # A plan for another number of workers says nothing of the threads of these.
    threads = plan.threads if plan.workers == workers else 0
    if device == "cpu":
        threads = threads or max(1, machine.host.cores // workers)
    wanted = Setting(device=device, workers=workers, threads=threads)
    return nearest_setting(settings_of(machine), wanted)


def _groups(
    workload: Workload | None,
    machine: Machine | None,
    setting: Setting | None,
    predicted: Timeline | None,
) -> tuple[OpGroup, ...]:
    """The operators with the times that the prediction used, else those of the cost model."""
    if workload is None:
        return ()
    times = times_from_timeline(workload, predicted) if predicted is not None else {}
    if not times and machine is not None and setting is not None:
        times = times_on_machine(workload, machine, setting)
    return group_ops(workload, times)


def _title(nouns: dict[str, Noun | None]) -> str:
    # What was measured says best what the page is about.
    for name, field in (
        ("measured", "title"),
        ("predicted", "title"),
        ("workload", "name"),
        ("history", "task"),
        ("scaling", "title"),
        ("predicted_scaling", "title"),
        ("intensities", "title"),
    ):
        noun = nouns[name]
        if noun is not None:
            return str(getattr(noun, field))
    return "Training report"


def _subtitle(machine: Machine | None, workload: Workload | None, timeline: Timeline | None) -> str:
    parts = []
    if timeline is not None:
        parts.append(units.counted(timeline.workers, "worker"))
    if workload is not None:
        parts.append(f"{workload.samples} samples each")
        parts.append(f"{units.quantity(workload.flops, 'FLOP')} a step and worker")
    if machine is not None:
        gpus = [device.name for device in machine.devices if device.kind == "cuda"]
        parts.append(gpus[0] if gpus else machine.host.processor)
        parts.append(f"torch {machine.host.torch}")
        # The day alone, for a line of few words; the section on the machine has the time.
        parts.append(f"machine measured on {machine.measured_at[:10]}")
    return " · ".join(parts)


def _page(title: str, subtitle: str, sections: dict[str, Markup]) -> str:
    links = (tag("a", _NAVIGATION[name], href=f"#{name}") for name in sections)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"ridgeline {VERSION}"),
        tag("title", f"{title} - Ridgeline"),
        tag("style", Markup(asset("page.css"))),
    )
    bar = tag(
        "div",
        tag(
            "div",
            tag("span", _LOGO, "Ridgeline", class_="brand"),
            tag("nav", *links, aria_label="Sections"),
        ),
        class_="bar",
    )
    header = tag(
        "header", tag("h1", title), tag("p", subtitle) if subtitle else None, class_="title"
    )
    body = tag(
        "body",
        tag("a", "Skip to the report", class_="skip", href="#report"),
        bar,
        tag("main", header, *sections.values(), id="report"),
        tag("footer", f"Made by Ridgeline {VERSION}. This file works offline and loads nothing."),
        # Within the page, whose policy lets it load nothing.
        tag("script", Markup(get_plotlyjs())),
        tag("script", Markup(asset("page.js"))),
    )
    return join((Markup("<!doctype html>\n"), tag("html", head, body, lang="en")))
