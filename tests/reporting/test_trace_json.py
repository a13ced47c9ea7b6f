"""The Chrome trace: complete, nested, escaped, and the same bytes for the same timelines."""

import gzip
import json
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import RidgelineError
from ridgeline.reporting.charts.chart_timeline import timeline_figure
from ridgeline.reporting.trace_json import rows, trace_bytes, write_trace
from ridgeline.timeline import Span, Timeline


def span(name: str, lane: str, start: int, end: int, **more) -> Span:
    return Span(name=name, lane=lane, start_ns=start, end_ns=end, **more)


def timeline(*spans: Span, origin: str = "predicted") -> Timeline:
    return Timeline(origin=origin, title="t", workers=2, spans=spans, steps_ns=(100,))


def events(path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


SPANS = st.lists(
    st.builds(
        lambda start, length: span("s", "compute", start, start + length),
        st.integers(0, 50),
        st.integers(0, 20),
    ),
    max_size=25,
)


@given(SPANS)
def test_rows_nest_and_lose_nothing(spans: list[Span]) -> None:
    """In a row any two spans are disjoint or nested, and every span is in exactly one row."""
    placed = rows(spans)
    for row in placed:
        for one, other in combinations(row, 2):
            disjoint = one.end_ns <= other.start_ns or other.end_ns <= one.start_ns
            nested = (one.start_ns <= other.start_ns and other.end_ns <= one.end_ns) or (
                other.start_ns <= one.start_ns and one.end_ns <= other.end_ns
            )
            assert disjoint or nested
    flat = [(s.start_ns, s.end_ns) for row in placed for s in row]
    assert sorted(flat) == sorted((s.start_ns, s.end_ns) for s in spans)


def test_predicted_and_measured_are_two_processes(tmp_path, predicted, measured) -> None:
    """Each timeline is a process with its own name; each lane and its operators are named threads."""
    path = write_trace(tmp_path / "trace.json.gz", predicted, measured)
    found = events(path)
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {1: "predicted: resnet18, 2 workers", 2: "measured: resnet18, 2 workers"}
    threads = [e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["host", "compute", "compute ops", "communication"]


def test_every_span_is_a_complete_event(tmp_path, predicted, measured) -> None:
    """Spans become `X` events with microseconds that keep every nanosecond, and their attributes."""
    path = write_trace(tmp_path / "trace.json.gz", predicted, measured)
    slices = [e for e in events(path) if e["ph"] == "X"]
    assert len(slices) == len(predicted.spans) + len(measured.spans)
    first = predicted.named("backward/0")
    event = next(e for e in slices if e["name"] == "backward/0" and e["pid"] == 1)
    assert round(event["ts"] * 1000) == first.start_ns
    assert round(event["dur"] * 1000) == first.duration_ns
    detail = next(e for e in slices if e["cat"] == "op")
    assert detail["args"]["bound"] in ("compute", "memory", "dispatch")


def test_arrows_lead_from_backward_to_its_all_reduce(tmp_path) -> None:
    """A flow starts inside backward/k and ends at the start of all_reduce/k."""
    made = timeline(
        span("backward/0", "compute", 0, 40),
        span("all_reduce/0", "communication", 40, 90),
        span("all_reduce/7", "communication", 90, 95),
    )
    flows = [e for e in events(write_trace(tmp_path / "t.gz", made)) if e["ph"] in "sf"]
    assert [(e["ph"], e["ts"], e["tid"]) for e in flows] == [("s", 0.039, 1), ("f", 0.04, 2)]
    assert flows[0]["id"] == flows[1]["id"]
    assert flows[1]["bp"] == "e"


def test_overlapping_collectives_move_to_a_further_row(tmp_path) -> None:
    """Spans of a lane that overlap without nesting never share a thread."""
    made = timeline(
        span("all_reduce/0", "communication", 0, 60), span("all_reduce/1", "communication", 40, 90)
    )
    found = events(write_trace(tmp_path / "t.gz", made))
    threads = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert threads == ["communication", "communication (2)"]


def test_lanes_of_one_kind_have_threads_of_their_own(tmp_path) -> None:
    """Where a kind has more than one lane, each is named with its index; a single lane is not."""
    made = timeline(
        span("a", "compute", 0, 60, index=1),
        span("b", "compute", 10, 60),
        span("op", "compute", 10, 20, detail=True),
        span("c", "disk", 0, 5),
    )
    found = events(write_trace(tmp_path / "t.gz", made))
    threads = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert threads == ["compute:0", "compute:0 ops", "compute:1", "disk"]
    assert [str(text) for text in timeline_figure([made])["layout"]["yaxis"]["ticktext"]] == [
        "compute:0",
        "compute:0 ops",
        "compute:1",
        "disk",
    ]


def test_same_timelines_give_same_bytes(tmp_path, predicted, measured) -> None:
    """Nothing in the file depends on the moment of writing."""
    first = write_trace(tmp_path / "a.gz", predicted, measured).read_bytes()
    assert write_trace(tmp_path / "b.gz", predicted, measured).read_bytes() == first
    assert first[4:8] == b"\0\0\0\0"  # where gzip keeps the time of compression


def test_control_characters_and_odd_numbers_are_escaped() -> None:
    """The JSON text is printable ASCII and strict JSON whatever names and numbers say."""
    made = timeline(
        span("a\x00\x1b\x7f\u2028é", "compute", 0, 1, attributes={"x": float("nan"), "y": 1.5})
    )
    text = trace_bytes({"predicted": made})
    assert all(32 <= byte < 127 for byte in text)
    event = next(e for e in json.loads(text)["traceEvents"] if e["ph"] == "X")
    assert event["name"] == "a\x00\x1b\x7f\u2028é"
    assert event["args"] == {"x": "nan", "y": 1.5}


def test_nothing_to_write_is_an_error(tmp_path) -> None:
    """A trace needs a timeline, and the message says so."""
    with pytest.raises(RidgelineError) as caught:
        write_trace(tmp_path / "t.gz")
    assert str(caught.value) == (
        f"wanted a predicted or a measured timeline, got neither for {tmp_path / 't.gz'}; "
        "give at least one of them to write_trace"
    )
    assert list(tmp_path.iterdir()) == []
