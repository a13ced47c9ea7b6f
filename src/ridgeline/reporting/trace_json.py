"""Timelines as a Chrome trace: the file that Perfetto and `chrome://tracing` open.

Predicted and measured steps are two processes of one trace, lanes are threads, and the operators
inside a lane have a thread row of their own. Viewers drop slices that overlap without nesting, so
such spans move to a further row of the same lane. Format: the JSON object form of the Trace Event
Format; times are microseconds with three decimals, that is, whole nanoseconds.
"""

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ridgeline import units
from ridgeline.codec import VERSION, write_atomically
from ridgeline.errors import RidgelineError
from ridgeline.synchronisation import bucket_of
from ridgeline.timeline import LANES, Span, Timeline, lane_title

_PROCESSES = {"predicted": 1, "measured": 2}

Event = dict[str, Any]


def write_trace(
    path: str | Path, predicted: Timeline | None = None, measured: Timeline | None = None
) -> Path:
    """Write one or both timelines to `path` as a gzipped Chrome trace and return the path.

    The same timelines always give the same bytes. Written atomically.

    Args:
        path: File to write, by custom `trace.json.gz`.
        predicted: Timeline shown as process 1, "predicted".
        measured: Timeline shown as process 2, "measured".

    Raises:
        RidgelineError: neither timeline was given.
        OSError: the file cannot be written.
    """
    given = {"predicted": predicted, "measured": measured}
    timelines = {role: timeline for role, timeline in given.items() if timeline is not None}
    if not timelines:
        raise RidgelineError(
            f"wanted a predicted or a measured timeline, got neither for {path}; "
            "give at least one of them to write_trace"
        )
    target = Path(path)
    # Without the present time, so that equal timelines give equal bytes.
    write_atomically(target, gzip.compress(trace_bytes(timelines), mtime=0))
    return target


def trace_bytes(timelines: dict[str, Timeline]) -> bytes:
    """The trace as JSON text, not compressed; keys are `predicted` and `measured`."""
    events: list[Event] = []
    for role, timeline in timelines.items():
        events.extend(_process(role, timeline))
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "made_by": f"ridgeline {VERSION}",
            **{
                role: {
                    "title": timeline.title,
                    "workers": timeline.workers,
                    "step_ns": timeline.step_ns,
                    "steps": len(timeline.steps_ns),
                    "counters": _plain(timeline.counters),
                    "notes": list(timeline.notes),
                }
                for role, timeline in timelines.items()
            },
        },
    }
    # ASCII output: control characters, and what some viewers choke on, leave as \u escapes.
    text = json.dumps(trace, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # DEL is ASCII, so that `json` leaves it as it is.
    return text.replace("\x7f", "\\u007f").encode("ascii")


def rows(spans: Iterable[Span]) -> tuple[tuple[Span, ...], ...]:
    """The spans of one lane spread over as few rows as first fit needs, so that each row nests.

    In a row any two spans are disjoint or one holds the other. Rows keep spans by start, longer first.
    """
    placed: list[list[Span]] = []
    open_ends: list[list[int]] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns, s.name)):
        for row, ends in zip(placed, open_ends, strict=True):
            # What has ended by then holds nothing more.
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                row.append(span)
                ends.append(span.end_ns)
                break
        else:
            placed.append([span])
            open_ends.append([span.end_ns])
    return tuple(tuple(row) for row in placed)


def _process(role: str, timeline: Timeline) -> Iterator[Event]:
    """All events of one timeline: names first, then slices by row, then the arrows between them."""
    pid = _PROCESSES[role]
    workers = units.counted(timeline.workers, "worker")
    yield _metadata(pid, 0, "process_name", "name", f"{role}: {timeline.title}, {workers}")
    yield _metadata(pid, 0, "process_sort_index", "sort_index", pid)
    thread_of: dict[int, int] = {}
    for tid, (name, spans) in enumerate(_named_rows(timeline), 1):
        yield _metadata(pid, tid, "thread_name", "name", name)
        # Without it viewers order rows as they like.
        yield _metadata(pid, tid, "thread_sort_index", "sort_index", tid)
        for span in spans:
            # By identity, since equal spans may be in different rows.
            thread_of[id(span)] = tid
            yield _slice(pid, tid, span)
    yield from _flows(pid, timeline, thread_of)


def _named_rows(timeline: Timeline) -> Iterator[tuple[str, tuple[Span, ...]]]:
    places = [(lane, index) for lane in LANES for index in timeline.indexes(lane)]
    for lane, lane_index in places:
        title = lane_title(lane, lane_index, timeline.indexes(lane))
        members = [s for s in timeline.spans if s.lane == lane and s.index == lane_index]
        for is_detail in (False, True):
            base = f"{title} ops" if is_detail else title
            for index, row in enumerate(rows(s for s in members if s.detail == is_detail)):
                yield (base if index == 0 else f"{base} ({index + 1})"), row


def _slice(pid: int, tid: int, span: Span) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": span.name,
        "cat": "op" if span.detail else "frame",
        # The format has microseconds, in which three decimals are whole nanoseconds.
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
        "args": _plain(span.attributes),
    }


def _flows(pid: int, timeline: Timeline, thread_of: dict[int, int]) -> Iterator[Event]:
    """Arrows from the computation that fills a bucket to where that bucket is reduced."""
    for reduce in timeline.frames:
        bucket = bucket_of(reduce.name)
        source = None if bucket is None else timeline.named(f"backward/{bucket}")
        if source is None:
            continue
        # A viewer ties an arrow to the slice that is open at its time; at the very end none is.
        leaves_ns = max(source.start_ns, min(source.end_ns - 1, reduce.start_ns))
        shared = {"pid": pid, "id": f"{pid}.{bucket}", "name": "bucket ready", "cat": "flow"}
        yield {**shared, "ph": "s", "tid": thread_of[id(source)], "ts": leaves_ns / 1000}
        yield {
            **shared,
            "ph": "f",
            # To the slice that is open then; by default viewers take the next one that begins.
            "bp": "e",
            "tid": thread_of[id(reduce)],
            "ts": reduce.start_ns / 1000,
        }


def _metadata(pid: int, tid: int, name: str, field: str, value: str | int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {field: value}}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON cannot say (NaN, infinity) as text."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
