"""Sample nouns: one step of a small ResNet-18 on two CPU workers, predicted and measured.

Numbers are invented but hang together: durations follow from FLOP, bytes and the ceilings, the
measured step differs from the predicted one by a fixed pattern of a few per cent.
"""

import math

import msgspec
import pytest

from ridgeline.history import EpochPoint, History, StepPoint
from ridgeline.machine import (
    Ceiling,
    Collective,
    CurvePoint,
    Device,
    Dispatch,
    Host,
    Machine,
    Overlap,
    Quantity,
    Setting,
    SizePoint,
)
from ridgeline.plan import Alternative, Choice, Plan, Sync, cut_buckets
from ridgeline.planner import Candidate, Ranking
from ridgeline.timeline import Span, Timeline
from ridgeline.verdict import Verdict, verify
from ridgeline.workload import MemoryPoint, Op, Parameter, TensorSpec, Workload

SETTING = Setting(device="cpu", workers=2, threads=1)
MATMUL = 61e9
CONVOLUTION = 48e9
MEMORY = 9.4e9
LABELS = {"convolution": "convolution", "normalization": "batch_norm", "elementwise": "relu_"}


def measured_quantity(value: float, unit: str, spread: float = 0.03) -> Quantity:
    return Quantity(
        value=value,
        unit=unit,
        low=value * (1 - spread / 2),
        high=value * (1 + spread / 2),
        n=9,
        source="measured",
    )


def make_machine() -> Machine:
    def ceiling(family: str, dtype: str, rate: float, unit: str) -> Ceiling:
        curve = tuple(
            CurvePoint(work=2.0**power, rate=rate * (1 - math.exp(-(2.0 ** (power - 22)))))
            for power in range(18, 30, 2)
        )
        quantity = measured_quantity(rate, unit)
        return Ceiling(setting=SETTING, family=family, dtype=dtype, rate=quantity, curve=curve)

    table = tuple(
        SizePoint(
            num_bytes=1 << power,
            seconds=measured_quantity(9e-5 + (1 << power) / 0.42e9, "s", 0.08),
        )
        for power in range(10, 27, 2)
    )
    return Machine(
        fingerprint="9f3c2a71",
        measured_at="2026-11-21T10:00:00+00:00",
        host=Host(
            name="ridge-01",
            processor="Xeon Platinum 8481C",
            cores=2,
            memory_bytes=8 << 30,
            cache_bytes=105 << 20,
            system="Linux 6.1",
            python="3.11.2",
            torch="2.13.0",
        ),
        devices=(Device(kind="cpu", index=0, name="Xeon Platinum 8481C", memory_bytes=8 << 30),),
        ceilings=(
            ceiling("matmul", "float32", MATMUL, "FLOP/s"),
            ceiling("matmul", "bfloat16", 2.6 * MATMUL, "FLOP/s"),
            ceiling("convolution", "float32", CONVOLUTION, "FLOP/s"),
            ceiling("elementwise", "float32", 0.8 * MEMORY, "B/s"),
            ceiling("memory", "float32", MEMORY, "B/s"),
        ),
        dispatch=(
            Dispatch(device="cpu", phase="forward", seconds=measured_quantity(6.1e-6, "s")),
            Dispatch(device="cpu", phase="backward", seconds=measured_quantity(8.8e-6, "s")),
            Dispatch(device="cpu", phase="optimizer", seconds=Quantity.assumed(5e-6, "s")),
        ),
        collectives=(
            Collective(setting=SETTING, operation="all_reduce", backend="gloo", table=table),
            Collective(setting=SETTING, operation="broadcast", backend="gloo", table=table[:5]),
        ),
        overlaps=(
            Overlap(
                setting=SETTING,
                compute_slowdown=measured_quantity(1.12, "x"),
                communication_slowdown=measured_quantity(1.31, "x"),
            ),
        ),
        warnings=("clock frequency varied by 4 % during the probe",),
    )


def layers() -> list[tuple[str, int, int, int, int]]:
    """(module, channels in, channels out, kernel, output side) of the convolutions."""
    found = [("net.0", 1, 64, 7, 14)]
    channels, side = 64, 7
    for stage, width in enumerate((64, 128, 256, 512)):
        side = side if stage == 0 else (side + 1) // 2
        for block in range(2):
            entry = channels if block == 0 else width
            found.append((f"net.{stage + 1}.{block}.conv1", entry, width, 3, side))
            found.append((f"net.{stage + 1}.{block}.conv2", width, width, 3, side))
            if block == 0 and stage:
                found.append((f"net.{stage + 1}.{block}.conv3", entry, width, 1, side))
        channels = width
    return found


def spec(*shape: int) -> TensorSpec:
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorSpec(shape=shape, stride=strides, dtype="float32")


def make_op(phase: str, name: str, module: str, family: str, flops: int, ins, outs) -> Op:
    return Op(
        name=f"aten.{name}.default",
        phase=phase,
        module=module,
        family=family,
        dtype="float32",
        inputs=tuple(ins),
        outputs=tuple(outs),
        arguments="[]",
        flops=flops,
        bytes_read=4 * sum(math.prod(i.shape) for i in ins),
        bytes_written=4 * sum(math.prod(o.shape) for o in outs),
    )


def make_workload(samples: int = 128) -> Workload:
    ops: list[Op] = []
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for module, inner, outer, kernel, side in layers():
        image, weight = spec(samples, inner, side, side), spec(outer, inner, kernel, kernel)
        result = spec(samples, outer, side, side)
        flops = 2 * samples * outer * side * side * inner * kernel * kernel
        norm = module.replace("conv", "bn")
        ops.append(
            make_op(
                "forward", "convolution", module, "convolution", flops, (image, weight), (result,)
            )
        )
        ops.append(
            make_op("forward", "native_batch_norm", norm, "normalization", 0, (result,), (result,))
        )
        ops.append(make_op("forward", "relu", norm, "elementwise", 0, (result,), (result,)))
        shapes += [(f"{module}.weight", weight.shape), (f"{norm}.weight", (outer,))]
    features, head = spec(samples, 512), spec(10, 512)
    ops.append(
        make_op(
            "forward",
            "addmm",
            "fc",
            "matmul",
            2 * samples * 5120,
            (features, head),
            (spec(samples, 10),),
        )
    )
    shapes.append(("fc.weight", (10, 512)))
    ready: dict[str, int] = {}
    for op in reversed(tuple(ops)):
        ready[f"{op.module}.weight"] = len(ops)
        factor = 2 if op.flops else 1
        ops.append(
            make_op(
                "backward",
                op.name.split(".")[1] + "_backward",
                op.module,
                op.family,
                factor * op.flops,
                (*op.inputs, *op.outputs),
                op.inputs,
            )
        )
    parameters = tuple(
        Parameter(
            name=name,
            shape=shape,
            dtype="float32",
            num_bytes=4 * math.prod(shape),
            is_trainable=True,
            ready_op=ready[name],
        )
        for name, shape in shapes
    )
    weights = [spec(*shape) for _, shape in shapes]
    ops.append(make_op("optimizer", "_foreach_add_", "", "elementwise", 0, weights * 2, weights))
    return Workload(
        name="resnet18",
        device="cpu",
        samples=samples,
        batch=(spec(samples, 1, 28, 28),),
        ops=tuple(ops),
        parameters=parameters,
        ready_order=tuple(p.name for p in sorted(parameters, key=lambda p: p.ready_op)),
        buffer_bytes=38_400,
        memory=make_memory(ops, sum(p.num_bytes for p in parameters)),
        dependency_source="make_fx",
    )


def make_memory(ops: list[Op], parameter_bytes: int) -> tuple[MemoryPoint, ...]:
    points, activation, gradient = [], 0, 0
    num_backward = sum(op.phase == "backward" for op in ops)
    for index, op in enumerate(ops):
        if op.phase == "forward":
            activation += op.bytes_written
        elif op.phase == "backward":
            activation = max(0, activation - op.bytes_written)
            gradient += parameter_bytes // num_backward
        points.append(
            MemoryPoint(
                op=index,
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradient,
                state_bytes=parameter_bytes,
                activation_bytes=activation,
            )
        )
    return tuple(points)


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


@pytest.fixture(scope="session")
def machine() -> Machine:
    return make_machine()


@pytest.fixture(scope="session")
def workload() -> Workload:
    return make_workload()


@pytest.fixture(scope="session")
def predicted(workload: Workload) -> Timeline:
    return make_timeline(workload)


@pytest.fixture(scope="session")
def measured(workload: Workload) -> Timeline:
    return make_timeline(workload, "measured")


@pytest.fixture(scope="session")
def history() -> History:
    return make_history()


@pytest.fixture(scope="session")
def verdict(
    machine: Machine, workload: Workload, predicted: Timeline, measured: Timeline
) -> Verdict:
    return verify(predicted, measured, machine=machine, workload=workload)


@pytest.fixture(scope="session")
def ranking(predicted: Timeline, measured: Timeline) -> Ranking:
    return make_ranking(predicted, measured)
