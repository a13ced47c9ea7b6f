"""The sample run: its plans, its step as predicted and as measured, and its history.

Durations follow from FLOP, bytes and the ceilings of the sample machine; the measured step differs from
the predicted one by a fixed pattern of a few per cent.
"""

import math

import msgspec
from sample_machine import CONVOLUTION, MATMUL, MEMORY

from ridgeline.history import EpochPoint, History, StepPoint
from ridgeline.plan import Alternative, Choice, Plan, Sync, cut_buckets
from ridgeline.planner import Candidate, Ranking
from ridgeline.timeline import Span, Timeline
from ridgeline.workload import Op, Workload

PLAN = Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(6 << 20,)))


def op_cost(op: Op) -> tuple[int, str]:
    """(nanoseconds, bound) of an op on the sample machine."""
    rate = {"convolution": CONVOLUTION, "matmul": MATMUL}.get(op.family, math.inf)
    compute, memory = op.flops / rate, op.bytes_moved / MEMORY
    bound = (
        "dispatch" if max(compute, memory) < 6e-6 else "compute" if compute > memory else "memory"
    )
    return int(1e9 * max(compute, memory, 6e-6)), bound


def make_timeline(workload: Workload, origin: str = "predicted") -> Timeline:
    """The frames of a two-worker step with six buckets, and its operators as details."""
    measured = origin == "measured"
    gradients = [(p.num_bytes, p.dtype) for p in workload.gradients]
    buckets = cut_buckets(gradients, PLAN.sync.bucket_bytes)
    ready = [workload.gradients[bucket[-1]].ready_op for bucket in buckets]
    sizes = [sum(gradients[index][0] for index in bucket) for bucket in buckets]
    spans: list[Span] = []

    def add(name: str, lane: str, start: int, end: int, detail: bool = False, **attributes) -> int:
        spans.append(
            Span(
                name=name,
                lane=lane,
                start_ns=start,
                end_ns=end,
                detail=detail,
                attributes=attributes,
            )
        )
        return end

    clock = add("input", "host", 0, 420_000 if measured else 150_000)
    frame_start, bucket, starts = clock, 0, []
    for index, op in enumerate(workload.ops):
        nanoseconds, bound = op_cost(op)
        if measured:
            nanoseconds = int(nanoseconds * (1.06 + 0.05 * math.sin(index)))
        if op.phase == "optimizer":
            break
        end = clock + nanoseconds
        if not measured:
            add(op.name, "compute", clock, end, True, op=index, flops=op.flops,
                bytes=op.bytes_moved, bound=bound, source="ceiling", module=op.module)  # fmt: skip
        clock = end
        if op.phase == "forward" and workload.ops[index + 1].phase == "backward":
            frame_start = add("forward", "compute", frame_start, clock)
        if op.phase == "backward" and bucket < len(buckets) and index >= ready[bucket]:
            frame_start = add(f"backward/{bucket}", "compute", frame_start, clock)
            starts.append(clock)
            bucket += 1
    done = add(f"backward/{len(buckets)}", "compute", frame_start, clock)
    free = 0
    for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        seconds = (9e-5 + size / 0.42e9) * (1.17 if measured else 1.0)
        free = add(f"all_reduce/{index}", "communication", max(start, free),
                   max(start, free) + int(seconds * 1e9), bytes=size, bound="link")  # fmt: skip
    free = add("broadcast_buffers", "communication", free, free + 190_000, bytes=38_400)
    waited = add("wait", "compute", done, max(done, free))
    optimizer, _ = op_cost(workload.ops[-1])
    total = add("optimizer", "compute", waited, waited + int(optimizer * (1.1 if measured else 1)))
    return Timeline(
        origin=origin,
        title="resnet18",
        workers=2,
        spans=tuple(spans),
        steps_ns=tuple(int(total * (1 + 0.01 * (k - 4))) for k in range(9))
        if measured
        else (total,),
        counters={"overhead_ns": 61_000.0} if measured else {},
    )


def scaled(timeline: Timeline, factor: float) -> Timeline:
    steps = tuple(int(step * factor) for step in timeline.steps_ns)
    return msgspec.structs.replace(timeline, steps_ns=steps)


def make_ranking(predicted: Timeline, measured: Timeline) -> Ranking:
    """Six plans: two tried, one of which failed."""
    choice = Choice(
        knob="bucket_bytes",
        value="6291456",
        origin="search",
        reason="measured 1.03 x as fast as the best plan with 26214400",
        alternatives=(Alternative(value="26214400", step_s=0.589, is_measured=True),),
    )
    plans = [msgspec.structs.replace(PLAN, choices=(choice,))]
    plans += [msgspec.structs.replace(PLAN, sync=Sync(bucket_bytes=(b << 20,))) for b in (1, 25)]
    plans += [Plan(workers=1, threads=2), Plan(workers=1, threads=1)]
    factors = (1.0, 1.013, 1.034, 1.38, 1.93)
    candidates = [
        Candidate(
            plan=plan,
            timeline=scaled(predicted, factor),
            why=f"reason {index}",
            measured=scaled(measured, factor) if index == 0 else None,
            failure="failed when tried" if index == 4 else "",
            samples=256,
        )
        for index, (plan, factor) in enumerate(zip(plans, factors, strict=True))
    ]
    return Ranking(candidates=tuple(candidates), error=0.05, notes=("links were not measured",))


def make_history() -> History:
    steps = tuple(
        StepPoint(
            step=step,
            epoch=step // 200,
            loss=2.1 * math.exp(-step / 260) + 0.22 + 0.05 * math.sin(step),
            samples_per_s=2350 + 60 * math.sin(step / 7),
        )
        for step in range(0, 800, 10)
    )
    epochs = tuple(
        EpochPoint(
            epoch=k,
            step=200 * (k + 1),
            metric=0.93 - 0.3 * math.exp(-k),
            mean_loss=1.3 * 0.6**k,
            train_s=21.8,
        )
        for k in range(4)
    )
    return History(task="resnet18", steps=steps, epochs=epochs)
