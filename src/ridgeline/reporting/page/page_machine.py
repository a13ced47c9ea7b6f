"""Sections of the report about the machine, the training run, and the data behind the page."""

from collections.abc import Iterator, Mapping

from ridgeline import units
from ridgeline.codec import Noun, encode
from ridgeline.history import History, metric_text
from ridgeline.machine import Ceiling, Machine, Setting
from ridgeline.reporting.charts.chart_places import link_matrix_figure, staircase_figure
from ridgeline.reporting.charts.chart_rates import (
    collectives_figure,
    efficiency_figure,
    links_figure,
)
from ridgeline.reporting.charts.charts import training_figures
from ridgeline.reporting.charts.figure import Figure
from ridgeline.reporting.effects.machine_effects import machine_effects
from ridgeline.reporting.labels import (
    as_sentence,
    at_work,
    gpus_of,
    numbers_grid,
    quantities_of,
    stated_of,
)
from ridgeline.reporting.links import link_matrix, link_rates
from ridgeline.reporting.page.html import Content, Markup, join, raw_data_script, table, tag
from ridgeline.reporting.page.outages import outages_grid, outages_reading
from ridgeline.reporting.page.page_gpu import gpu_charts
from ridgeline.reporting.page.sections import chart, chart_box, facts, grid_box, section
from ridgeline.synchronisation import operations

MOST_EMBEDDED_BYTES = 8_000_000
"""A noun larger than this stays beside the page instead of in it, so that the page opens quickly."""


def training_section(history: History | None) -> Markup | None:
    """Loss, metric, speed and outages; None without any."""
    if history is None or not (history.steps or history.epochs or history.outages):
        return None
    boxes = [
        tag("div", tag("h3", title), chart(f"training-{index}", figure, title))
        for index, (title, figure) in enumerate(training_figures(history))
    ]
    return section(
        "training",
        "Training",
        training_reading(history),
        tag("div", *boxes, class_="grid3"),
        grid_box(outages_grid(history.outages)) if history.outages else None,
    )


def training_reading(history: History) -> str:
    """One sentence on how the loss and the metric moved, how fast it went, and what it went through."""
    parts = []
    if history.steps:
        first, last = history.steps[0], history.steps[-1]
        parts.append(
            f"the loss went from {units.digits3(first.loss)} to {units.digits3(last.loss)} "
            f"by step {last.step}"
        )
    if history.epochs:
        last_epoch = history.epochs[-1]
        finite = [point.metric for point in history.epochs if point.metric is not None]
        # As the terminal has it.
        highest = f" (highest {metric_text(max(finite), finite)})" if finite else ""
        metric = metric_text(last_epoch.metric, finite)
        train_s = sum(point.train_s for point in history.epochs)
        parts.append(
            f"after {units.counted(len(history.epochs), 'epoch')} and {units.seconds(train_s)} of training "
            f"the metric is {metric}{highest}"
        )
    if history.outages:
        parts.append(outages_reading(history.outages))
    return as_sentence("; ".join(parts))


def machine_section(machine: Machine | None, setting: Setting | None) -> Markup | None:
    """Every number about the hardware with spread and source; None without a machine."""
    if machine is None:
        return None
    boxes = [grid_box(effect) for effect in machine_effects(machine)]
    return section(
        "machine",
        "Machine",
        machine_reading(machine, setting),
        _facts(machine),
        _curves(machine, setting),
        tag("div", *(tag("div", box) for box in boxes), class_="grid2") if boxes else None,
        grid_box(numbers_grid(machine)),
        tag("ul", *(tag("li", warning) for warning in machine.warnings), class_="notes")
        if machine.warnings
        else None,
    )


def machine_reading(machine: Machine, setting: Setting | None) -> str:
    """One sentence on the highest ceiling and where the numbers come from."""
    quantities = [figure.number for figure in quantities_of(machine)]
    measured = sum(quantity.source == "measured" for quantity in quantities)
    text = f"{measured} of {len(quantities)} numbers were measured on this machine"
    # The setting of the run on this page; the highest ceiling may belong to more threads.
    mine = [c for c in machine.ceilings if setting is None or c.setting == setting]
    best = max(
        (ceiling for ceiling in mine if ceiling.rate.unit.startswith("FLOP")),
        key=lambda ceiling: ceiling.rate.value,
        default=None,
    )
    if best is None:
        return f"{text}."
    rate = units.quantity(best.rate.value, best.rate.unit)
    stated = stated_of(machine, best)
    share = (
        f", {units.percent(best.rate.value / stated.value)} of the datasheet's," if stated else ""
    )
    return (
        f"{text}; each worker reaches at most {rate} ({best.family}, {best.dtype}){share} "
        f"while {at_work(best.setting)}."
    )


def data_section(nouns: Mapping[str, Noun | None], trace_name: str | None) -> Markup | None:
    """The raw values behind the page, embedded and to be saved; None without any."""
    given = {name: noun for name, noun in nouns.items() if noun is not None}
    if not given:
        return None
    rows: list[tuple[Content, ...]] = []
    scripts: list[Markup] = []
    for name, noun in given.items():
        data = encode(noun)
        if len(data) > MOST_EMBEDDED_BYTES:
            action: Content = "too large to embed; see the file beside this page"
        else:
            scripts.append(raw_data_script(f"noun-{name}", data.decode()))
            action = tag(
                "button", "Save", type="button", data_source=f"noun-{name}", data_file=f"{name}.json",
                aria_label=f"Save {name}.json",
            )  # fmt: skip
        rows.append(
            (tag("code", f"{name}.json"), _summary(noun), units.num_bytes(len(data)), action)
        )
    if trace_name:
        link = tag("a", "Open the folder's copy", href=trace_name)
        rows.append(
            (tag("code", trace_name), "Both timelines for Perfetto or chrome://tracing", "", link)
        )
    again = "ridgeline scaling --report" if list(given) == ["scaling"] else "ridgeline report"
    if "predicted_scaling" in given or "intensities" in given:
        again = "ridgeline simulate --report"
    return section(
        "data",
        "Data",
        f"Everything on this page was drawn from these values; {again} makes the page again.",
        table(("File", "Content", "Size", ""), rows, caption="Data behind this page", numeric=(2,)),
        *scripts,
    )


def _summary(noun: Noun) -> str:
    text = repr(noun)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _facts(machine: Machine) -> Markup:
    host = machine.host
    told = {
        "Host": host.name,
        "Processor": f"{host.processor}, {host.cores} cores",
        "GPU": ", ".join(gpus_of(machine.devices)),
        "Memory": units.num_bytes(host.memory_bytes),
        "Last-level cache": units.num_bytes(host.cache_bytes) if host.cache_bytes else "",
        "Software": f"{host.system}, Python {host.python}, torch {host.torch}",
        "Measured": units.moment(machine.measured_at),
        "Fingerprint": machine.fingerprint,
    }
    return facts({name: value for name, value in told.items() if value})


def _curves(machine: Machine, setting: Setting | None) -> Markup | None:
    boxes = [chart_box(*one) for one in _drawn(machine)]
    boxes += gpu_charts(machine.gpu)
    titles = {"FLOP/s": "Rate by operation size", "B/s": "Bandwidth by operation size"}
    for unit, title in titles.items() if setting is not None else ():
        mine = [c for c in machine.ceilings if c.setting == setting and c.rate.unit == unit]
        # The sentence reads the first curve of several on one pair of axes.
        curved = next((ceiling for ceiling in mine if ceiling.curve), None)
        if setting is not None and curved is not None:
            figure = efficiency_figure(machine, setting, unit)
            boxes.append(chart_box(f"efficiency-{unit[0]}", title, _curve_reading(curved), figure))
    return tag("div", join(boxes), class_="grid2") if boxes else None


def _drawn(machine: Machine) -> Iterator[tuple[str, str, str, Figure]]:
    """Identity, title, reading and figure of what moves data."""
    if machine.collectives:
        reading, figure = _collectives_reading(machine), collectives_figure(machine)
        yield "collectives", "Collectives by size", reading, figure
    if any(link.table for link in machine.links):
        reading = "Between pinned host memory and a GPU, and between two GPUs."
        yield "links", "Copies by size", reading, links_figure(machine)
    if (matrix := link_matrix(machine)) is not None:
        reading, figure = _links_reading(machine), link_matrix_figure(matrix)
        yield "link-matrix", "Copies between devices", reading, figure
    if machine.stairs:
        yield "staircase", "Memory by size", _stairs_reading(machine), staircase_figure(machine)


def _curve_reading(ceiling: Ceiling) -> str:
    """Where a curve is highest, and what is left of that at its smallest and largest size."""
    best = max(ceiling.curve, key=lambda point: point.rate)
    work = ceiling.rate.unit.partition("/")[0]
    ends = [
        f"{units.percent(point.rate / best.rate)} at {units.quantity(point.work, work)}"
        for point in (ceiling.curve[0], ceiling.curve[-1])
        if point != best
    ]
    rate = units.quantity(best.rate, ceiling.rate.unit)
    rest = f"; it keeps {' and '.join(ends)}" if ends else ""
    return (
        f"While {at_work(ceiling.setting)}, {ceiling.family} in {ceiling.dtype} is fastest at "
        f"{units.quantity(best.work, work)} with {rate}{rest}."
    )


def _links_reading(machine: Machine) -> str:
    """The fastest and the slowest pair at the largest size measured."""
    rates = link_rates(machine)
    (fast, best), (slow, least) = (
        pick(rates.items(), key=lambda pair: pair[1]) for pick in (max, min)
    )
    return (
        f"{' to '.join(fast)} copies {units.quantity(best, 'B/s')}, {' to '.join(slow)} "
        f"{units.quantity(least, 'B/s')}, at the largest size measured."
    )


def _stairs_reading(machine: Machine) -> str:
    """What the smallest and the largest walk cost, and what order is worth in the largest."""
    first, last = machine.stairs[0], machine.stairs[-1]
    return (
        f"A load that waits for another takes {units.seconds(first.access_s.value)} in "
        f"{units.num_bytes(first.num_bytes)} and {units.seconds(last.access_s.value)} in "
        f"{units.num_bytes(last.num_bytes)}; read in order, one core gets "
        f"{units.quantity(last.rate_in_order, 'B/s')} of the latter, at random "
        f"{units.quantity(last.rate_at_random, 'B/s')}."
    )


def _collectives_reading(machine: Machine) -> str:
    usual = operations(machine.collectives[0].setting.device)[0]
    # That of gradients, among the most workers: the one that training waits for.
    entry = max(machine.collectives, key=lambda c: (c.operation == usual, c.setting.workers))
    rates = [point.num_bytes / point.seconds.value for point in entry.table]
    # From there on bandwidth counts for more than latency.
    half = next(
        point.num_bytes
        for point, rate in zip(entry.table, rates, strict=True)
        if rate >= max(rates) / 2
    )
    return (
        f"{entry.operation} over {entry.setting.workers} workers reaches "
        f"{units.quantity(max(rates), 'B/s')}, and half of that from {units.num_bytes(half)} on."
    )
