"""The report: one file, offline, complete, escaped; sections follow the data."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from printed import as_text
from ridgeline.errors import RidgelineError
from ridgeline.history import History, Outage
from ridgeline.machine import Machine
from ridgeline.reporting.report import report, setting_of
from ridgeline.reporting.terminal.text import warnings
from ridgeline.timeline import Timeline

SECTIONS = [
    "verdict", "waterfall", "timeline", "roofline", "plan",
    "training", "frames", "memory", "machine", "data",
]  # fmt: skip


class Reader(HTMLParser):
    """What the tests look at: sections, attributes, scripts, text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: dict[str, str] = {}
        self.num_code_scripts = 0
        self.headings: list[str] = []
        self.open: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in known.items()]
        if tag == "section":
            self.sections.append(known["id"])
        if tag == "script" and "type" not in known:
            self.num_code_scripts += 1
        if tag not in ("meta", "path", "circle"):
            self.open.append((tag, known))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, known = self.open[-1] if self.open else ("", {})
        if tag == "script":
            self.scripts[known.get("id", "")] = data
        elif tag != "style":
            self.text.append(data)


def read(path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


@pytest.fixture(scope="module")
def nouns(machine, workload, ranking, predicted, measured, verdict, history) -> dict:
    return {
        "machine": machine, "workload": workload, "ranking": ranking, "predicted": predicted,
        "measured": measured, "verdict": verdict, "history": history,
    }  # fmt: skip


@pytest.fixture(scope="module")
def page(nouns, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "trace.json.gz").write_bytes(b"")
    return report(folder / "report.html", **nouns)


@pytest.fixture(scope="module")
def content(page) -> Reader:
    return read(page)


def test_sections_come_in_order(content: Reader) -> None:
    """With everything given all ten sections are there, the verdict first."""
    assert content.sections == SECTIONS


def test_a_date_says_of_what_it_is(content: Reader) -> None:
    """The head names when the machine was measured, which may be days before the run."""
    head = next(text for text in content.text if "torch" in text)
    assert head.endswith(" · machine measured on 2026-11-21")


def test_nothing_is_fetched(page, content: Reader) -> None:
    """No element points outside of the file, and a policy forbids the browser to try."""
    for tag, name, value in content.attributes:
        if name in ("src", "srcset", "poster", "data", "action"):
            pytest.fail(f"{tag} {name}={value}")
        if name == "href":
            assert tag == "a"
            assert value.startswith("#") or value == "trace.json.gz"
    policy = [value for _, name, value in content.attributes if value.startswith("default-src")]
    assert policy == [
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    ]
    text = page.read_text(encoding="utf-8")
    style = text.split("<style>", 1)[1].split("</style>", 1)[0]
    assert not re.search(r"@import|@font-face|url\(|https?:", style)


def test_the_charts_library_is_embedded_once(page, content: Reader) -> None:
    """The library and the page's own script are the only scripts with code."""
    text = page.read_text(encoding="utf-8")
    assert text.count("* plotly.js v") == 1
    assert content.num_code_scripts == 2


def test_raw_nouns_read_back(content: Reader, nouns: dict) -> None:
    """Every noun is embedded as its file would be, with a button that saves it."""
    for name, noun in nouns.items():
        envelope = json.loads(content.scripts[f"noun-{name}"])
        assert envelope["kind"] == noun.kind
        assert msgspec.convert(envelope["value"], type(noun)) == noun
    saved = {value for tag, name, value in content.attributes if name == "data-file"}
    assert saved == {f"{name}.json" for name in nouns}


def test_figures_are_strict_json_with_their_place(content: Reader) -> None:
    """Every chart has its figure, and every figure its chart."""
    wanted = {value for _, name, value in content.attributes if name == "data-figure"}
    figures = {name for name in content.scripts if name.startswith("figure-")}
    assert wanted == figures
    assert {"figure-timeline", "figure-roofline", "figure-memory"} <= figures
    for name in figures:
        figure = json.loads(content.scripts[name])
        assert figure["data"]
        assert figure["layout"]["height"] > 0


def test_colours_exist_in_the_palette(page, content: Reader) -> None:
    """Every colour name used by a figure is defined by the style, or it would draw black."""
    style = page.read_text(encoding="utf-8").split("<style>", 1)[1].split("</style>", 1)[0]
    defined = set(re.findall(r"--([\w-]+):", style))
    used = set()
    for name, text in content.scripts.items():
        if name.startswith("figure-"):
            used |= set(re.findall(r'"@([\w-]+)"', text))
    used |= set(
        re.findall(r"var\(--([\w-]+)\)", page.read_text(encoding="utf-8").split("</style>")[1])
    )
    assert used
    assert used <= defined


def test_dark_palette_names_only_known_colours(page) -> None:
    """The dark theme overrides colours of the light one and invents none."""
    style = page.read_text(encoding="utf-8").split("<style>", 1)[1].split("</style>", 1)[0]
    light, dark = style.split("prefers-color-scheme: dark", 1)
    dark = dark.split("\n}\n", 1)[0]
    assert set(re.findall(r"--([\w-]+):", dark)) <= set(re.findall(r"--([\w-]+):", light))


def test_every_section_has_a_sentence(page) -> None:
    """Every picture is read for the visitor: a heading, then a sentence that ends."""
    text = page.read_text(encoding="utf-8")
    readings = re.findall(r'<h2 id="(\w+)-title">[^<]*</h2><p class="reading">([^<]*)</p>', text)
    assert [name for name, _ in readings] == SECTIONS[1:]
    for _, sentence in readings:
        assert not sentence[0].islower()
        assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("given", "sections"),
    [
        (("machine",), ["machine", "data"]),
        (("workload",), ["memory", "data"]),
        (("predicted",), ["verdict", "timeline", "data"]),
        (("predicted", "measured"), ["verdict", "timeline", "frames", "data"]),
        (("history",), ["training", "data"]),
        (("ranking",), ["plan", "data"]),
        (("machine", "workload", "predicted"),
         ["verdict", "timeline", "roofline", "memory", "machine", "data"]),
    ],
)  # fmt: skip
def test_what_is_missing_leaves_its_sections_out(nouns, tmp_path, given, sections) -> None:
    """A part that was not given leaves no empty section behind."""
    path = report(tmp_path / "r.html", **{name: nouns[name] for name in given})
    reader = read(path)
    assert reader.sections == sections
    linked = [v[1:] for t, n, v in reader.attributes if t == "a" and n == "href" and v != "#report"]
    assert linked == sections


def test_outages_are_shown(history: History, tmp_path: Path) -> None:
    """In the sentence, the table and the text for the terminal."""
    outage = Outage(
        worker=2,
        server=1,
        address="tcp://10.0.0.2:5555",
        began_at="2026-01-31T12:00:05+00:00",
        lasted_s=6.04,
        pushes_again=1,
        is_replaced=True,
    )
    back = msgspec.structs.replace(outage, lasted_s=15.5, pushes_again=3, is_replaced=False)
    history = msgspec.structs.replace(history, outages=(outage, back))
    text = " ".join(read(report(tmp_path / "report.html", history=history)).text)
    assert "training continued after 2 outages of servers, the longest of 15.5\u00a0s." in text
    row = "1 worker 2 2026-01-31 12:00:05 UTC 6.04 s 1 replaced, now at tcp://10.0.0.2:5555"
    assert row in text
    assert "15.5 s 3 back at tcp://10.0.0.2:5555" in text
    assert as_text(*warnings(map(str, history.outages))).splitlines() == [
        (
            "! worker 2 got no answer from server 1 from 2026-01-31 12:00:05 UTC on for 6.0 s; another took "
            "its place at tcp://10.0.0.2:5555, 1 push sent again"
        ),
        (
            "! worker 2 got no answer from server 1 from 2026-01-31 12:00:05 UTC on for 15.5 s; it came "
            "back at tcp://10.0.0.2:5555, 3 pushes sent again"
        ),
    ]
    alone = report(tmp_path / "alone.html", history=History(task="stores", outages=(outage,)))
    assert read(alone).sections == ["training", "data"]


def test_a_history_is_named_by_its_course(nouns) -> None:
    """Not by its hundreds of points: the list of the page's data has it in a line."""
    history = nouns["history"]
    assert repr(history) == "History(resnet18: 4 epochs, 0 outages, loss 2.32 to 0.271 at step 790)"
    assert repr(History(task="tiny")) == "History(tiny: 0 epochs, 0 outages)"


def test_hostile_names_stay_text(nouns, tmp_path) -> None:
    """Names of tasks, frames and modules can hold markup and never become any."""
    evil = '<img src=x onerror="alert(1)">&lt;</script><script>alert(2)</script>'
    spans = tuple(
        msgspec.structs.replace(s, name=evil, attributes={**s.attributes, "module": evil})
        for s in nouns["measured"].spans
    )
    measured = msgspec.structs.replace(nouns["measured"], title=evil, spans=spans, notes=(evil,))
    host = msgspec.structs.replace(nouns["machine"].host, name=evil, processor=evil)
    machine = msgspec.structs.replace(nouns["machine"], host=host, warnings=(evil,))
    path = report(tmp_path / "r.html", measured=measured, machine=machine)
    reader = read(path)
    assert reader.num_code_scripts == 2
    assert not [tag for tag, _, _ in reader.attributes if tag == "img"]
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert evil in "".join(reader.text)
    bars = json.loads(reader.scripts["figure-timeline"])["data"]
    shown = "".join(text for trace in bars for text in (*trace["customdata"], *trace["text"]))
    assert "<img" not in shown
    assert "<script" not in shown


def test_nothing_given_is_an_error(tmp_path) -> None:
    """An empty report is refused, and no file is left."""
    with pytest.raises(RidgelineError) as caught:
        report(tmp_path / "r.html")
    assert str(caught.value) == (
        f"wanted at least one value to report on, got none for {tmp_path / 'r.html'}; "
        "give report a machine, workload, ranking, timeline, verdict, history or scaling"
    )
    assert list(tmp_path.iterdir()) == []


def test_trace_is_linked_only_where_it_lies_beside(nouns, page, content, tmp_path) -> None:
    """The link to the trace is there exactly when the file is."""
    assert ("a", "href", "trace.json.gz") in content.attributes
    alone = read(report(tmp_path / "r.html", measured=nouns["measured"]))
    assert ("a", "href", "trace.json.gz") not in alone.attributes


def test_large_nouns_stay_beside_the_page(nouns, tmp_path, monkeypatch) -> None:
    """A noun above the limit is named but not embedded."""
    monkeypatch.setattr("ridgeline.reporting.page.page_machine.MOST_EMBEDDED_BYTES", 100)
    reader = read(report(tmp_path / "r.html", measured=nouns["measured"]))
    assert "noun-measured" not in reader.scripts
    assert "too large to embed; see the file beside this page" in reader.text


def test_setting_is_that_of_the_run(machine: Machine, workload, measured: Timeline) -> None:
    """Ceilings are those of the run's workers; a setting nobody measured gives the nearest."""
    wanted = machine.ceilings[0].setting
    assert setting_of(machine, workload, None, measured) == wanted
    four = msgspec.structs.replace(measured, workers=4)
    assert setting_of(machine, workload, None, four) == wanted
    assert setting_of(None, workload, None, measured) is None


def test_a_lone_worker_says_nothing_of_communication(workload, tmp_path, ranking) -> None:
    """Without communication the reading of the timeline speaks of computing."""
    from ridgeline.reporting.page.page_step import timeline_reading
    from ridgeline.timeline import Span

    spans = (
        Span(name="input", lane="host", start_ns=0, end_ns=10_000_000),
        Span(name="forward", lane="compute", start_ns=10_000_000, end_ns=40_000_000),
    )
    alone = Timeline(origin="measured", title="t", workers=1, spans=spans, steps_ns=(40_000_000,))
    assert timeline_reading(alone) == (
        "The step takes 40.0 ms; the compute lane is busy for 75.0 % of it, nothing is communicated."
    )


def test_a_step_without_length_is_reported(nouns, tmp_path) -> None:
    """A timeline of no recorded steps has a step of 0 ns: nothing is shown as a share of it."""
    nothing = msgspec.structs.replace(nouns["measured"], steps_ns=(0,))
    given = nouns | {"measured": nothing, "verdict": None}
    content = read(report(tmp_path / "r.html", **given))
    (reading,) = (text for text in content.text if "the largest difference is in" in text)
    assert reading.endswith("than predicted.")
