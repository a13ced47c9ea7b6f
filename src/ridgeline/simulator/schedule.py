"""When the frames of a step run, and what is seen inside them.

On the CPU a frame lasts as long as its operators and their dispatch. On a GPU the host issues operators
while the device runs earlier ones: in the steady state the faster side waits for the slower. When the
device is slower, the host is steps ahead and launches are hidden; when the host is, or when it reads what
the device computes, every operator starts no earlier than it was issued, and the step takes as long as that.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ridgeline.execution import MODES
from ridgeline.plan import Execution
from ridgeline.simulator.events import SimTask, run_tasks
from ridgeline.simulator.frames import Frame
from ridgeline.simulator.held_steps import held_step
from ridgeline.simulator.model import StepModel
from ridgeline.simulator.pricing.pieces import Piece, issued
from ridgeline.timeline import Span

_LEAD = "lead"
SETTLING_STEPS = 4
"""Steps until each takes as long as the one before: the host then begins as far ahead as it ever will."""


class Issue(NamedTuple):
    """What the host does in one step of the steady state, in seconds from when it begins with it.

    `at_s` has for each frame when each of its pieces had been issued.
    """

    at_s: dict[str, list[float]]
    step_s: float


def schedule(
    model: StepModel, *, device: str, execution: Execution, details: bool = True
) -> tuple[Span, ...]:
    """The spans of one step in the steady state: frames and, inside them, operators.

    Args:
        model: What there is to run.
        device: `cpu` or `cuda`.
        execution: Tells whether a GPU replays the step; matters nowhere else.
        details: Whether operators are shown.

    Source: Daydream (Zhu et al., ATC 2020): a kernel starts when its stream is free and its launch
        has been issued.
    """
    spans, parts = frame_spans(model), None
    if model.late_reads:
        spans, parts = held_step(model)
    end_ns = max((span.end_ns for span in spans), default=0)
    issue_s = 0.0
    is_replayed = MODES[execution].is_replayed_on(device)
    issue: Issue | None = None
    if device == "cuda":
        issue = None if is_replayed else issue_step(model)
        issue_s = model.replay_s if issue is None else issue.step_s
    # Only then: with a faster host every kernel follows the one before, whenever it was issued.
    if issue is not None and issue_s * 1e9 > end_ns:
        frames, shown = _host_bound(model, issue)
    else:
        frames = contiguous(spans)
        shown = _inside(model, parts or _frame_parts(model, spans)) if details else []
        if issue_s * 1e9 > end_ns:  # a replay cannot be issued faster than this
            frames[-1] = msgspec.structs.replace(frames[-1], end_ns=round(issue_s * 1e9))
    if not details:
        return tuple(frames)
    return (*frames, *shown, *_issuing(model, issue, issue_s))


def frame_spans(model: StepModel) -> tuple[Span, ...]:
    """One span a frame, each as long as all that is in it; gaps between graph kernels included."""
    parts = [_tasks(model, frame) for frame in model.frames]
    # All frames on one clock: what overlaps depends on the order across frames.
    spans = iter(run_tasks([task for part in parts for task in part], model.slowdown))
    merged = []
    for part in parts:
        ran = [next(spans) for _ in part]
        merged.append(msgspec.structs.replace(ran[0], end_ns=ran[-1].end_ns))
    return tuple(merged)


def _tasks(model: StepModel, frame: Frame) -> tuple[SimTask, ...]:
    """A frame as tasks of its lane: one, or three where gradients are encoded around a collective."""
    task = SimTask.of(frame, frame_seconds(model, frame))
    encoding = model.encodings.get(frame.name)
    if encoding is None:
        return (task,)
    # On the lane of the collective, as one thread encodes, sends and decodes.
    before, after = (
        msgspec.structs.replace(
            task, duration_ns=round(seconds * 1e9), slowdown=dict(encoding.slowdown)
        )
        for seconds in (encoding.before_s, encoding.after_s)
    )
    return before, task, after


def frame_seconds(model: StepModel, frame: Frame) -> float:
    """Seconds of a frame on its lane when nothing slows it; of a collective without what encodes for it."""
    if frame.lane == "communication":
        return model.communication_s[frame.name]
    held = model.pieces.get(frame.name, ())
    return _nominal_seconds(model, held)


def _nominal_seconds(model: StepModel, held: Sequence[Piece]) -> float:
    """Seconds of some pieces one after the other, with the gaps behind the kernels of a graph."""
    return sum(p.lane_s + (model.gap_s if p.has_kernel else 0.0) for p in held)


def contiguous(spans: Sequence[Span]) -> list[Span]:
    """Frames on the compute lane begin where the one before ended, as the runtime's marks do."""
    placed: list[Span] = []
    reached: int | None = None
    for span in spans:
        is_next = span.lane == "compute" and reached is not None
        placed.append(msgspec.structs.replace(span, start_ns=reached) if is_next else span)
        reached = span.end_ns if span.lane == "compute" else reached
    return placed


_Parts = Sequence[tuple[tuple[Piece, ...], Span]]


def _frame_parts(model: StepModel, spans: Sequence[Span]) -> _Parts:
    """What computes in each frame."""
    held = (model.pieces.get(frame.name, ()) for frame in model.frames)
    return list(zip(held, spans, strict=True))


def _inside(model: StepModel, parts: _Parts) -> list[Span]:
    """Operators one after the other in their frames, stretched like the frame where it was slowed."""
    shown: list[Span] = []
    for held, span in parts:
        nominal = _nominal_seconds(model, held)
        if nominal <= 0.0:
            continue
        stretch = span.duration_ns / nominal
        at = 0.0
        for piece in held:
            end = at + piece.lane_s
            if piece.lane_s > 0.0:
                start_ns = span.start_ns + round(at * stretch)
                shown.append(_detail(piece, start_ns, span.start_ns + round(end * stretch)))
            at = end + (model.gap_s if piece.has_kernel else 0.0)
    return shown


def issue_step(model: StepModel) -> Issue:
    """Issue the step again and again, as a training loop does.

    Collectives are left out: they have a lane of their own.
    """
    host_s = device_s = 0.0
    issue = Issue({}, 0.0)
    # Without waits the host never looks at the device, and the first step is as all others.
    waits = any(piece.waits for held in model.pieces.values() for piece in held)
    for _ in range(SETTLING_STEPS if waits else 1):
        begin_s, at_s = host_s, dict[str, list[float]]()
        for frame in model.frames:
            held = model.pieces.get(frame.name, ())
            times_s, host_s, device_s = issued(held, host_s, device_s)
            at_s[frame.name] = [time_s - begin_s for time_s in times_s]
        issue = Issue(at_s, host_s - begin_s)
    return issue


def _host_bound(model: StepModel, issue: Issue) -> tuple[list[Span], list[Span]]:
    """Frames and operators when the device waits for launches.

    In the steady state the device is still busy with the end of one step when the host begins to issue
    the next. A first pass finds how long (`lead`), the second one starts from there.
    """
    issue_ns = round(issue.step_s * 1e9)
    tasks, held = _issued_tasks(model, issue)
    first = run_tasks(tasks, model.slowdown)
    # What is left on the device when the host could issue the next step delays that one's first kernels.
    lead_ns = max(0, max((s.end_ns for s in first if s.lane == "compute"), default=0) - issue_ns)
    lead = SimTask(name=_LEAD, lane="compute", duration_ns=lead_ns)
    spans = run_tasks((lead, *tasks), model.slowdown)[1:]
    frames: list[Span] = []
    shown: list[Span] = []
    position, reached = 0, 0
    for frame, pieces in zip(model.frames, held, strict=True):
        count = max(1, len(pieces))
        ran = spans[position : position + count]
        position += count
        start, end = (max(0, t - lead_ns) for t in (ran[0].start_ns, ran[-1].end_ns))
        if frame.lane == "compute":
            start, reached = reached, end
        frames.append(Span(name=frame.name, lane=frame.lane, start_ns=start, end_ns=end))
        shown += [
            _detail(piece, span.start_ns - lead_ns, span.end_ns - lead_ns)
            for piece, span in zip(pieces, ran, strict=bool(pieces))
        ]
    return frames, shown


def _issued_tasks(model: StepModel, issue: Issue) -> tuple[list[SimTask], list[tuple[Piece, ...]]]:
    """One task a kernel, released when the host has issued it; and the kernels of each frame."""
    tasks: list[SimTask] = []
    held: list[tuple[Piece, ...]] = []
    host_s = 0.0
    for frame in model.frames:
        kernels: list[Piece] = []
        times_s = issue.at_s[frame.name]
        for piece, host_s in zip(model.pieces.get(frame.name, ()), times_s, strict=True):
            if piece.has_kernel:
                kernels.append(piece)
                tasks.append(SimTask.of(frame, piece.lane_s, host_s))
        # A frame without kernels still orders what comes behind it.
        if not kernels:
            release_s = host_s if frame.lane == "communication" else 0.0
            tasks.append(SimTask.of(frame, frame_seconds(model, frame), release_s))
        held.append(tuple(kernels))
    return tasks, held


def _issuing(model: StepModel, issue: Issue | None, issue_s: float) -> list[Span]:
    """What the host does on a GPU: one detail span a frame, or one replay."""
    if issue is None:
        return [_host("issue graph", 0, round(issue_s * 1e9))] if issue_s > 0.0 else []
    spans = []
    at = 0.0
    for frame in model.frames:
        end = issue.at_s[frame.name][-1] if issue.at_s[frame.name] else at
        if end > at:
            spans.append(_host(f"issue {frame.name}", round(at * 1e9), round(end * 1e9)))
        at = end
    return spans


def _host(name: str, start_ns: int, end_ns: int) -> Span:
    return Span(
        name=name,
        lane="host",
        start_ns=start_ns,
        end_ns=end_ns,
        detail=True,
        attributes={"bound": "dispatch"},
    )


def _detail(piece: Piece, start_ns: int, end_ns: int) -> Span:
    """An operator's span; `op` is its operator, `ops` those that were fused, separated by spaces."""
    attributes: dict[str, str | float | int] = {
        "op": piece.op,
        "module": piece.module,
        "flops": piece.flops,
        "bytes": piece.num_bytes,
        "bound": piece.bound,
        "source": piece.source,
        "alone_ns": round(piece.lane_s * 1e9),
        "ideal_ns": round(piece.ideal_s * 1e9),
        "roofline_ns": round(piece.roofline_s * 1e9),
        "dispatch_ns": round(piece.fixed_s * 1e9),
    }
    if piece.members:
        attributes["ops"] = " ".join(map(str, piece.members))
    if piece.op < 0 or piece.members:
        del attributes["op"]
    return Span(
        name=piece.name,
        lane="compute",
        start_ns=start_ns,
        end_ns=end_ns,
        detail=True,
        attributes=attributes,
    )
