"""The frames of a training step: the tasks that the runtime executes and the simulator predicts.

Both sides call `step_frames`, so every measured span has a predicted span of the same name and lane.
A frame reads and writes variables and runs on one lane; frames on one lane run in the order given.

    input              host           waiting for the next batch (end of one step to start of the next)
    micro/0 ...        compute        forward and backward of all micro-batches but the last
    forward            compute        forward and loss of the (last) micro-batch
    broadcast_buffers  communication  buffers of worker 0 to all, as DistributedDataParallel keeps them
    backward/0 ... K-1 compute        until the last gradient of bucket k is in its bucket
    backward/K         compute        what is left of backward after the last bucket closed
    all_reduce/k       communication  mean of bucket k over the workers; named by the plan's algorithm
    sparse_rows        communication  sparse gradients, which no bucket holds, by an all-gather of their rows
    wait               compute        exposed communication: computing is done, gradients are not
    optimizer          compute        clipping and the optimizer

Where each worker updates its part of the parameters (an algorithm with `shards_update`), behind the optimizer

    all_gather         communication  updated parameters to all workers
    wait               compute        until they are there

A worker alone has `backward` undivided and neither communication nor `wait`. So has one of several that train
alone for some steps (`Sync.every` > 1), and behind the optimizer, in every step, with or without an exchange

    all_reduce/0       communication  exchange of parameters and buffers, and the outer optimizer
    wait               compute        until that is over

Where the whole step is one
program (`step-graph`, `packaged`) there is only `input` and

    step               compute        forward, backward and optimizer of all micro-batches
"""

from collections.abc import Sequence

from ridgeline.codec import Value
from ridgeline.execution import MODES, check_alone
from ridgeline.plan import Execution, Sync
from ridgeline.synchronisation import (
    GATHERING,
    SPARSE_ROWS,
    frame_names,
    shards_update,
    trains_apart,
)
from ridgeline.timeline import Lane

WHOLE_STEP = "step"
"""The frame of a step that is one program: nothing inside it can be told apart."""


class Frame(Value, frozen=True, kw_only=True):
    """One task of the step: its span name, its lane, and the variables it reads and writes."""

    name: str
    lane: Lane
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def step_frames(
    *,
    workers: int,
    num_buckets: int,
    accumulate: int = 1,
    has_buffers: bool = False,
    execution: Execution = "eager",
    sync: Sync | None = None,
    has_rows: bool = False,
) -> tuple[Frame, ...]:
    """The frames of one step in the order in which the host issues them.

    Args:
        workers: Data-parallel workers.
        num_buckets: Gradient buckets; ignored for one worker.
        accumulate: Micro-batches per step.
        has_buffers: Whether the model has buffers that must follow worker 0.
        execution: How the step runs; one program is one frame.
        sync: Names the frames of the buckets, and says whether parameters are exchanged instead; None takes
            the default.
        has_rows: Whether there are sparse gradients, which are exchanged behind the buckets.

    Raises:
        PlanError: several workers, and a step that is one program.
    """
    frames = [Frame(name="input", lane="host", writes=("batch",))]
    if MODES[execution].is_one_program:
        check_alone(execution, workers)
        changed = ("gradients", "buffers", "parameters")
        return (*frames, _computing(WHOLE_STEP, ("batch",), changed))
    reads = ("batch", "parameters")
    frames += [_computing(f"micro/{i}", reads, ("gradients",)) for i in range(accumulate - 1)]
    frames.append(_computing("forward", reads, ("activations", "buffers")))
    rhythm = sync or Sync()
    if workers > 1 and not trains_apart(rhythm):
        names = frame_names(rhythm, num_buckets)
        frames += _synchronised(names, has_buffers=has_buffers, has_rows=has_rows)
        frames += _gathered() if shards_update(rhythm) else []
        return tuple(frames)
    frames.append(_computing("backward", ("activations",), ("gradients",)))
    frames.append(_computing("optimizer", ("gradients",), ("parameters",)))
    if workers > 1:
        # It writes what it reads: the next step may use neither before it is over.
        common = ("parameters", "buffers")
        (name,) = frame_names(rhythm, 1)
        frames.append(Frame(name=name, lane="communication", reads=common, writes=common))
        frames.append(_computing("wait", common))
    return tuple(frames)


def _computing(name: str, reads: tuple[str, ...], writes: tuple[str, ...] = ()) -> Frame:
    return Frame(name=name, lane="compute", reads=reads, writes=writes)


def _gathered() -> list[Frame]:
    """What follows the optimizer where each worker has updated its part of the parameters."""
    updated = ("parameters",)
    return [
        Frame(name=GATHERING, lane="communication", reads=updated, writes=updated),
        _computing("wait", updated),
    ]


def _synchronised(names: Sequence[str], *, has_buffers: bool, has_rows: bool) -> list[Frame]:
    """What follows forward on one of several workers: backward beside the collectives, and the optimizer."""
    frames: list[Frame] = []
    buckets = tuple(f"bucket/{index}" for index in range(len(names)))
    if has_buffers:
        frames.append(Frame(name="broadcast_buffers", lane="communication", writes=("buffers",)))
    for index, (name, bucket) in enumerate(zip(names, buckets, strict=True)):
        frames.append(_computing(f"backward/{index}", ("activations",), ("gradients", bucket)))
        frames.append(Frame(name=name, lane="communication", writes=(bucket,)))
    frames.append(_computing(f"backward/{len(names)}", ("activations",), ("gradients",)))
    synchronised = (*buckets, "buffers") if has_buffers else buckets
    if has_rows:  # behind the means of all others
        reads = (*synchronised, "gradients")
        frames.append(Frame(name=SPARSE_ROWS, lane="communication", reads=reads, writes=("rows",)))
        synchronised = (*synchronised, "rows")
    frames.append(_computing("wait", synchronised))
    frames.append(_computing("optimizer", synchronised, ("parameters",)))
    return frames
