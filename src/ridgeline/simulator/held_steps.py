"""Steps that hold buckets follow each other: the period of that pipeline, and what is seen of a step in it.

The exchanges of held buckets begin when backward is over, and go on beside the update, the time between steps
and the next forward pass, up to the operator that reads them (see `synchronisation.holding`). All are there
before the next backward pass begins. So whatever came before, when the backward pass of a step begins the
link is idle and the parameters are updated: the time from one such moment to the next is exactly the period,
and one schedule that begins there, and ends with the forward pass of the next step, gives it.

A step is shown from its own begin. An exchange that is on its way then is shown from there, as the recorder
of a run does; what of it came before is not shown.

Source: a moment at which a process starts anew ends its cycle (renewal; Smith, "Regenerative stochastic
processes", 1955); two and more steps simulated one behind the other take as long in the tests.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ridgeline.simulator.events import SimTask, run_tasks
from ridgeline.simulator.frames import Frame
from ridgeline.simulator.model import StepModel
from ridgeline.simulator.pricing.pieces import Piece
from ridgeline.timeline import Span

_OVER = ("gradients",)
"""Written by all parts of backward, the last one too."""


class HeldStep(NamedTuple):
    """A step in the steady state: spans of its frames, in the model's order, and what computes in them."""

    frames: tuple[Span, ...]
    parts: tuple[tuple[tuple[Piece, ...], Span], ...]


class _Work(NamedTuple):
    """A task of the schedule: of which frame, the pieces in it, and whether it is of the next step."""

    task: SimTask
    frame: str
    pieces: tuple[Piece, ...]
    is_next: bool = False


def held_step(model: StepModel) -> HeldStep:
    """The step of a model that has late reads, of which the last frame ends with the period.

    The model is of a CPU's step.
    """
    work = _period(model)
    spans = run_tasks([one.task for one in work], model.slowdown)
    period_ns = max(span.end_ns for span in spans)
    # The step is shown from its own begin, which is where the update of the one before ended.
    begin_ns = next(
        s.end_ns for one, s in zip(work, spans, strict=True) if one.frame == "optimizer"
    )
    # What ended before is of the next step. An exchange that began before is cut there, as a recorder does.
    moved = [
        span.moved((0 if one.is_next or span.end_ns > begin_ns else period_ns) - begin_ns)
        for one, span in zip(work, spans, strict=True)
    ]
    ran = list(zip(work, moved, strict=True))
    frames = tuple(span for frame in model.frames for span in _shown(frame, ran))
    return HeldStep(frames, tuple((one.pieces, span) for one, span in ran if one.pieces))


def _shown(frame: Frame, ran: Sequence[tuple[_Work, Span]]) -> list[Span]:
    """A frame as a run records it: where it waits for held buckets and updates late, it is interrupted so."""
    spans = [span for one, span in ran if one.frame == frame.name]
    if len(spans) == 1:
        return spans
    shown: list[Span] = []
    at_ns = spans[0].start_ns
    for span in spans:
        if span.start_ns > at_ns:
            shown.append(Span(name="wait", lane=span.lane, start_ns=at_ns, end_ns=span.start_ns))
        # A frame that lasts no time is still shown once: measured steps have it, too.
        is_needed = span is spans[-1] and all(one.name != frame.name for one in shown)
        if span.duration_ns or is_needed:
            shown.append(span)
        at_ns = span.end_ns
    return shown


def _period(model: StepModel) -> list[_Work]:
    """The tasks from the start of backward to the end of the next step's forward pass, in order of issue."""
    names = [frame.name for frame in model.frames]
    end = names.index("forward") + 1
    following = [one._replace(is_next=True) for one in _to_backward(model, model.frames[:end])]
    return [*_from_backward(model, model.frames[end:]), *following]


def _from_backward(model: StepModel, frames: Sequence[Frame]) -> list[_Work]:
    """Backward, and the exchanges: those that are held when it is over, the last bucket first."""
    held = {read.frame for read in model.late_reads}
    buckets = {bucket for frame in frames if frame.name in held for bucket in frame.writes}
    found: list[_Work] = []
    waiting: list[_Work] = []
    for frame in frames:
        if frame.name in held:
            # They leave when all of backward is over, so they wait for its last writer.
            reads = (*frame.reads, *_OVER)
            waiting.append(_whole(model, frame, reads))
            continue
        if frame.name == "wait":
            # The last bucket holds the first layers, which the next forward pass reads first.
            found += reversed(waiting)
        found.append(_whole(model, frame, tuple(n for n in frame.reads if n not in buckets)))
    return found


def _to_backward(model: StepModel, frames: Sequence[Frame]) -> list[_Work]:
    """The next step until its backward: what reads first waits for what is held, and updates it."""
    written = {frame.name: frame.writes for frame in model.frames}
    # With micro-batches this is the first of them, not `forward`.
    reader = next(frame.name for frame in frames if frame.lane == "compute")
    found: list[_Work] = []
    for frame in frames:
        if frame.lane == "host":  # the batch is waited for when the step before has returned
            found.append(_whole(model, frame, ("parameters",)))
        elif frame.name == reader:
            found += _reading(model, frame, written)
        else:
            found.append(_whole(model, frame, frame.reads))
    return found


def _reading(model: StepModel, frame: Frame, written: dict[str, tuple[str, ...]]) -> list[_Work]:
    """The frame that reads the parameters first, in parts that each begin with a late update."""
    pieces = model.pieces.get(frame.name, ())
    found: list[_Work] = []
    at = 0
    for read in model.late_reads:
        found.append(_part(frame, pieces[at : read.at], frame.reads))
        late = _part(frame, (read.update,), written[read.frame])
        found.append(late._replace(task=msgspec.structs.replace(late.task, name="optimizer")))
        # Several buckets may be read by one operator: the part between them is then empty.
        at = max(at, read.at)
    found.append(_part(frame, pieces[at:], frame.reads))
    return found


def _whole(model: StepModel, frame: Frame, reads: tuple[str, ...]) -> _Work:
    if frame.lane == "communication":
        task = SimTask.of(frame, model.communication_s[frame.name])
        return _Work(msgspec.structs.replace(task, reads=reads), frame.name, ())
    return _part(frame, model.pieces.get(frame.name, ()), reads, frame.writes)


def _part(
    frame: Frame, pieces: tuple[Piece, ...], reads: tuple[str, ...], writes: tuple[str, ...] = ()
) -> _Work:
    task = SimTask.of(frame, sum(piece.lane_s for piece in pieces))
    return _Work(msgspec.structs.replace(task, reads=reads, writes=writes), frame.name, pieces)
