"""Replaying a timeline: the recorded durations on the virtual clock.

If the clock gives back the recorded step, then its order and its overlap are right, and what is wrong
with a prediction are the durations.
"""

from ridgeline.plan import Sync
from ridgeline.simulator.events import SimTask, run_tasks
from ridgeline.simulator.frames import WHOLE_STEP, step_frames
from ridgeline.simulator.schedule import contiguous
from ridgeline.synchronisation import algorithm_of
from ridgeline.timeline import Span, Timeline

_SOME = 2
"""Steps between exchanges that are not in every step: how many of them makes no other frames."""


def replay(timeline: Timeline) -> Timeline:
    """The timeline that the clock makes of another one's frame durations.

    `wait` is left to follow from the collectives. A collective starts when its bucket is full, so time
    that it was measured to wait for the others counts as its duration.

    Args:
        timeline: A predicted or measured step whose frames are those of `step_frames`.

    Source: replay error as in Lumos (MLSys 2025), reported apart from the prediction error.
    """
    recorded = {span.name: span for span in timeline.frames}
    algorithms = [entry for entry in map(algorithm_of, recorded) if entry is not None]
    # Of workers that train alone for some steps backward is undivided.
    every = _SOME if "backward" in recorded else 1
    frames = step_frames(
        workers=timeline.workers,
        num_buckets=len(algorithms),
        accumulate=1 + sum(name.startswith("micro/") for name in recorded),
        has_buffers="broadcast_buffers" in recorded,
        execution="step-graph" if WHOLE_STEP in recorded else "eager",
        sync=Sync(algorithm=algorithms[0].name, every=every) if algorithms else None,
    )
    tasks = tuple(
        SimTask(
            name=frame.name,
            lane=frame.lane,
            duration_ns=_duration_ns(recorded.get(frame.name)),
            reads=frame.reads,
            writes=frame.writes,
        )
        for frame in frames
    )
    spans = contiguous(run_tasks(tasks))
    return Timeline(
        origin="predicted",
        title=timeline.title,
        workers=timeline.workers,
        spans=tuple(spans),
        steps_ns=(max((span.end_ns for span in spans), default=0),),
        notes=(f"replay of the durations of a {timeline.origin} step",),
    )


def _duration_ns(span: Span | None) -> int:
    return 0 if span is None or span.name == "wait" else span.duration_ns
