"""Replaying a timeline: the recorded durations on the virtual clock.

If the clock gives back the recorded step, then its order and its overlap are right, and what is wrong
with a prediction are the durations, and the time between frames, of which a prediction knows nothing.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from ridgeline.codec import Value
from ridgeline.plan import Sync
from ridgeline.simulator.events import SimTask, dependencies, run_tasks
from ridgeline.simulator.frames import WHOLE_STEP, Frame, step_frames
from ridgeline.simulator.schedule import contiguous
from ridgeline.synchronisation import SPARSE_ROWS, algorithm_of, is_bucket_frame
from ridgeline.timeline import Lane, Span, Timeline

_SOME = 2
"""Steps between exchanges that are not in every step: how many of them makes no other frames."""
_BEHIND = "behind the last frame"


class Replay(Value, frozen=True, kw_only=True):
    """What the clock makes of a recorded step.

    `frames_ns` follow from the durations of its frames alone, `step_ns` from these and the gaps between them:
    how long each began after what it waited for, a `wait` ended after the last collective, and the step after
    its last frame. `gap_ns` is the largest of them, `gap` where it was.
    """

    recorded_ns: int
    frames_ns: int
    step_ns: int
    gap: str = ""
    gap_ns: int = 0

    @property
    def error(self) -> float:
        """Replayed over recorded step, minus 1: of a clock whose order and overlap are right it is 0."""
        return self.step_ns / self.recorded_ns - 1.0 if self.recorded_ns else 0.0


def replayed(timeline: Timeline) -> Replay | None:
    """How well the clock replays a recorded step.

    None for one with other frames than those of steps, and for one that holds buckets: its own frames do not
    tell what of its exchanges goes on in the next.
    """
    frames = _frames(timeline)
    # A frame by another name would silently be left out of the replayed step.
    unknown = {span.name for span in timeline.frames} - {frame.name for frame in frames}
    if unknown or not timeline.frames or _has_exchanges_of_before(timeline):
        return None
    gaps = [(part.gap_ns, part.where) for part in _parts(timeline, frames)]
    gaps.append((_rest_ns(timeline), _BEHIND))
    gap_ns, gap = max(gaps, key=lambda one: one[0])
    return Replay(
        recorded_ns=timeline.step_ns,
        frames_ns=replay(timeline).step_ns,
        step_ns=replay(timeline, with_gaps=True).step_ns,
        gap=gap if gap_ns else "",
        gap_ns=gap_ns,
    )


def replay(timeline: Timeline, *, with_gaps: bool = False) -> Timeline:
    """The timeline that the clock makes of another one's frame durations.

    `wait` is left to follow from the collectives. A collective starts when its bucket is full, so time
    that it was measured to wait for the others counts as its duration.

    With gaps a frame begins as long after what it waited for as it was recorded to.

    Source: replay error as in Lumos (MLSys 2025), reported apart from the prediction error; gaps between what
        is recorded as in Daydream (Zhu et al., ATC 2020).
    """
    frames = _frames(timeline)
    tasks: list[SimTask] = []
    shown: list[int] = []
    for frame, part in zip(frames, _parts(timeline, frames), strict=True):
        task = structs.replace(SimTask.of(frame, 0.0), duration_ns=part.duration_ns)
        # It holds the lane of the task, and waits for the same.
        wait = structs.replace(task, name="gap", duration_ns=part.gap_ns)
        gap = [wait] if with_gaps and part.gap_ns else []
        # A `wait` is late at its end (the last collective is noticed late), other frames at their begin.
        tail = [task, *gap] if frame.name == "wait" else [*gap, task]
        shown.append(len(tasks) + tail.index(task))
        tasks += tail
    ran = run_tasks(tasks)
    spans = [ran[index] for index in shown]
    end_ns = max((span.end_ns for span in ran), default=0)
    if with_gaps:
        end_ns += _rest_ns(timeline)
    return Timeline(
        origin="predicted",
        title=timeline.title,
        workers=timeline.workers,
        spans=tuple(spans if with_gaps else contiguous(spans)),
        steps_ns=(end_ns,),
        notes=(f"replay of the durations of a {timeline.origin} step",),
    )


def _has_exchanges_of_before(timeline: Timeline) -> bool:
    """Whether a bucket is under way before backward begins: it is one of the step before, see `holding`."""
    begins = [span.start_ns for span in timeline.frames if span.name == "backward/0"]
    return any(
        is_bucket_frame(span.name) and span.start_ns < begins[0]
        for span in timeline.frames
        if begins
    )


class _Part(NamedTuple):
    """What was recorded of a frame: how long it ran, and how long after what it waited for, or where else."""

    duration_ns: int
    gap_ns: int
    where: str


def _frames(timeline: Timeline) -> tuple[Frame, ...]:
    """The frames of the step that was recorded."""
    names = {span.name for span in timeline.frames}
    algorithms = {name: entry.name for name in names if (entry := algorithm_of(name)) is not None}
    # Of workers that train alone for some steps backward is undivided.
    every = _SOME if "backward" in names and timeline.workers > 1 else 1
    # By name, so that the same steps give the same frames.
    algorithm = algorithms[min(algorithms)] if algorithms else Sync().algorithm
    return step_frames(
        workers=1 if WHOLE_STEP in names else timeline.workers,
        num_buckets=len(algorithms),
        accumulate=1 + sum(name.startswith("micro/") for name in names),
        has_buffers="broadcast_buffers" in names,
        execution="step-graph" if WHOLE_STEP in names else "eager",
        sync=Sync(algorithm=algorithm, every=every),
        has_rows=SPARSE_ROWS in names,
    )


def _parts(timeline: Timeline, frames: Sequence[Frame]) -> Iterator[_Part]:
    """What was recorded of each frame, in their order; frames of one name in the order of their starts."""
    recorded: dict[str, deque[Span]] = {}
    for span in timeline.frames:
        recorded.setdefault(span.name, deque()).append(span)
    ends: list[int] = []
    free: dict[Lane, int] = {}
    for frame, waits in zip(frames, dependencies(frames), strict=True):
        ready = max(free.get(frame.lane, 0), *(ends[index] for index in waits), 0)
        found = recorded.get(frame.name)
        span = found.popleft() if found else None
        if span is None:
            yield _Part(0, 0, "")
        elif frame.name == "wait":
            # A wait has no work of its own: it lasts as long as what it waits for.
            yield _Part(0, max(0, span.end_ns - ready), f"in {frame.name}")
        else:
            yield _Part(span.duration_ns, max(0, span.start_ns - ready), f"before {frame.name}")
        ends.append(ready if span is None else span.end_ns)
        # Frames of one lane follow each other, also where no variable says so.
        free[frame.lane] = ends[-1]


def _rest_ns(timeline: Timeline) -> int:
    """What the recorded step lasted behind its last frame."""
    return max(0, timeline.step_ns - max((span.end_ns for span in timeline.frames), default=0))
