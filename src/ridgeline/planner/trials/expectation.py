"""`expected`: the predicted step, corrected by the trial of its plan: what is known when training begins.

A trial runs the very step that will be trained, so it knows better than any model how long each frame lasts.
What it does not see are the operators inside a frame; those stay as predicted, in proportion.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.timeline import Lane, Span, Timeline

_COMPILE_S = "compile_s"


class _Point(NamedTuple):
    """A moment of the predicted step, and when that is expected."""

    before_ns: int
    after_ns: int


def expected(predicted: Timeline, trial: Timeline | None) -> Timeline:
    """The predicted timeline with every frame as long as the trial of the same plan measured it.

    Spans keep their names, lanes and order on each lane, and frames that did not overlap do not. Frames that
    the trial did not record are scaled with what is around them; without any of its frames, all alike.

    Without a trial the prediction is left as it is; it may have operators or not.

    Returns:
        A timeline whose step lasts exactly as long as the trial's median step, with a note that gives both.
    """
    if trial is None or not trial.step_ns:
        return predicted
    frames = _moved(predicted, trial)
    whole = _Line(_Point(0, 0), _Point(predicted.step_ns, trial.step_ns))
    spans: list[Span] = []
    for index, span in enumerate(predicted.spans):
        if not span.detail:
            spans.append(frames.moved[index])
            continue
        line = frames.around(span) or whole
        spans.append(_at(span, line.at(span.start_ns), line.at(span.end_ns)))
    counters = dict(predicted.counters)
    if _COMPILE_S in counters and _COMPILE_S in trial.counters:
        counters[_COMPILE_S] = trial.counters[_COMPILE_S]
    note = (
        f"corrected by the trial: {units.nanoseconds(predicted.step_ns)} predicted before, "
        f"{units.nanoseconds(trial.step_ns)} measured in the trial"
    )
    return msgspec.structs.replace(
        predicted,
        spans=tuple(spans),
        steps_ns=(trial.step_ns,),
        notes=(note, *predicted.notes),
        counters=counters,
    )


def as_told(predicted: Timeline, told: Timeline) -> Timeline:
    """A predicted timeline with its operators, whose frames last as long as in an earlier prediction."""
    return msgspec.structs.replace(expected(predicted, told), notes=told.notes)


class _Line(NamedTuple):
    """The straight line between two points."""

    begin: _Point
    end: _Point

    def at(self, before_ns: int) -> int:
        """When a moment between them is expected."""
        length = self.end.before_ns - self.begin.before_ns
        if length <= 0:
            return self.begin.after_ns
        inside = min(max(before_ns - self.begin.before_ns, 0), length)
        return self.begin.after_ns + inside * (self.end.after_ns - self.begin.after_ns) // length


class _Frames(NamedTuple):
    """The frames of a prediction where they are expected, and the lines on which what is inside moves."""

    moved: dict[int, Span]
    """By their index among the spans."""
    lines: dict[tuple[Lane, int], list[_Line]]
    """Of each lane, by start."""

    def around(self, span: Span) -> _Line | None:
        """The line of the frame that a detail lies in; None where it lies in none."""
        lines = self.lines.get((span.lane, span.index), [])
        position = bisect_right(lines, span.start_ns, key=lambda line: line.begin.before_ns) - 1
        # A frame without duration begins where the next one does: the later one holds the detail.
        if position < 0 or span.end_ns > lines[position].end.before_ns:
            return None
        return lines[position]


def _moved(predicted: Timeline, trial: Timeline) -> _Frames:
    """Every frame of the prediction, lane by lane, at the place that the trial gives it."""
    lanes: dict[tuple[Lane, int], list[int]] = {}
    for index, span in enumerate(predicted.spans):
        if not span.detail:
            lanes.setdefault((span.lane, span.index), []).append(index)
    end = _Point(predicted.step_ns, trial.step_ns)
    measured = _measured(trial)
    frames = _Frames({}, {})
    for lane, indices in lanes.items():
        indices.sort(key=lambda i: (predicted.spans[i].start_ns, predicted.spans[i].end_ns))
        spans = [predicted.spans[index] for index in indices]
        lines = list(_lines(spans, measured, end))
        frames.lines[lane] = lines
        for index, line in zip(indices, lines, strict=True):
            span = predicted.spans[index]
            frames.moved[index] = _at(span, line.begin.after_ns, line.end.after_ns)
    return frames


def _measured(trial: Timeline) -> dict[tuple[str, Lane, int], list[tuple[int, int]]]:
    """(start, end) of the trial's frames by name and place, stretched to the length of its median step."""
    extent = max((span.end_ns for span in trial.frames), default=0)
    found: dict[tuple[str, Lane, int], list[tuple[int, int]]] = {}
    for span in trial.frames if extent else ():
        place = (span.start_ns * trial.step_ns // extent, span.end_ns * trial.step_ns // extent)
        found.setdefault((span.name, span.lane, span.index), []).append(place)
    return found


def _lines(
    frames: Sequence[Span],
    measured: dict[tuple[str, Lane, int], list[tuple[int, int]]],
    end: _Point,
) -> Iterator[_Line]:
    """Where the frames of one lane begin and end, in order; no frame is moved before the one ahead of it."""
    places: list[tuple[int, int] | None] = []
    for frame in frames:
        known = measured.get((frame.name, frame.lane, frame.index))
        places.append(known.pop(0) if known else None)
    reached = _Point(0, 0)
    """End of the last frame; of those that overlap, the latest."""
    begun_ns = 0
    for number, (frame, known_place) in enumerate(zip(frames, places, strict=True)):
        place = known_place
        if place is None:
            until = next(
                (
                    _Point(later.start_ns, known[0])
                    for later, known in zip(frames[number:], places[number:], strict=True)
                    if known is not None
                ),
                end,
            )
            gap = _Line(reached, _Point(until.before_ns, max(until.after_ns, reached.after_ns)))
            place = (gap.at(frame.start_ns), gap.at(frame.end_ns))
        least = reached.after_ns if frame.start_ns >= reached.before_ns else begun_ns
        start_ns = begun_ns = min(max(place[0], least), end.after_ns)
        end_ns = min(max(place[1], start_ns), end.after_ns)
        yield _Line(_Point(frame.start_ns, start_ns), _Point(frame.end_ns, end_ns))
        reached = max(reached, _Point(frame.end_ns, max(end_ns, reached.after_ns)))


def _at(span: Span, start_ns: int, end_ns: int) -> Span:
    return msgspec.structs.replace(span, start_ns=start_ns, end_ns=end_ns)
