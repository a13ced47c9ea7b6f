"""Machines, workloads and timelines for tests: plain makers, and hypothesis strategies over them.

The makers give round numbers, so that expected times can be worked out by hand: one operator at the
ceiling of 1 GFLOP/s or 1 GB/s takes as many nanoseconds as it has FLOP or bytes.
"""

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from ridgeline.machine import (
    Ceiling,
    CodecTiming,
    Collective,
    CurvePoint,
    Device,
    Dispatch,
    Host,
    Machine,
    OperatorTiming,
    Overlap,
    Quantity,
    Setting,
    SizePoint,
)
from ridgeline.simulator.events import SimTask
from ridgeline.timeline import LANES, Span, Timeline
from ridgeline.workload import MemoryPoint, Op, Parameter, TensorSpec, Workload

GIGA = 1e9


def measured(value: float, unit: str) -> Quantity:
    """A measured number without spread."""
    return Quantity(value=value, unit=unit, low=value, high=value, n=5, source="measured")


def make_host(cores: int = 2, memory_bytes: int = 8 << 30) -> Host:
    """A computer with nothing special."""
    return Host(
        name="host",
        processor="processor",
        cores=cores,
        memory_bytes=memory_bytes,
        cache_bytes=1 << 20,
        system="Linux",
        python="3.11",
        torch="2.13",
    )


def make_ceilings(
    setting: Setting, rate: float = GIGA, curve: Sequence[tuple[float, float]] = ()
) -> tuple[Ceiling, ...]:
    """One rate for every family: FLOP/s or B/s."""
    points = tuple(CurvePoint(work=work, rate=r) for work, r in curve)
    return tuple(
        Ceiling(
            setting=setting,
            family=family,
            dtype="float32",
            rate=measured(rate, unit),
            curve=points,
        )
        for family, unit in (
            ("matmul", "FLOP/s"),
            ("convolution", "FLOP/s"),
            ("elementwise", "B/s"),
            ("memory", "B/s"),
        )
    )


def make_collective(
    setting: Setting,
    latency_s: float = 1e-3,
    bandwidth: float = GIGA,
    operation: str = "all_reduce",
) -> Collective:
    """A size table of `latency + bytes / bandwidth`, from 1 B to 1 GiB."""
    return Collective(
        setting=setting,
        operation=operation,
        backend="gloo",
        table=tuple(
            SizePoint(num_bytes=1 << k, seconds=measured(latency_s + (1 << k) / bandwidth, "s"))
            for k in range(0, 31, 2)
        ),
    )


def make_codec_timing(
    setting: Setting, compression: str = "powersgd", slowdown: float = 2.0
) -> CodecTiming:
    """A millisecond a mebibyte to encode and decode, 10 us a parameter, 1 ms a shape."""
    return CodecTiming(
        setting=setting,
        compression=compression,
        table=tuple(
            SizePoint(num_bytes=1 << power, seconds=measured(2.0**power / 2**20 * 1e-3, "s"))
            for power in (16, 20, 24)
        ),
        parameter=measured(10e-6, "s"),
        shape=measured(1e-3, "s"),
        compute_slowdown=measured(slowdown, "x"),
        codec_slowdown=measured(slowdown, "x"),
    )


def make_settings(device: str, cores: int = 2) -> list[Setting]:
    """One worker and two, which share the cores."""
    if device == "cuda":
        return [Setting(device="cuda", workers=w) for w in (1, 2)]
    return [Setting(device="cpu", workers=w, threads=max(1, cores // w)) for w in (1, 2)]


def make_devices(num_gpus: int, memory_bytes: int) -> tuple[Device, ...]:
    """The processor, then the GPUs; all have as much memory."""
    kinds = (("cpu", 1), ("cuda", num_gpus))
    return tuple(
        Device(kind=kind, index=i, name=name, memory_bytes=memory_bytes)
        for (kind, count), name in zip(kinds, ("cpu", "gpu"), strict=True)
        for i in range(count)
    )


def make_machine(
    *,
    device: str = "cpu",
    settings: Sequence[Setting] | None = None,
    rate: float = GIGA,
    dispatch_s: float = 0.0,
    launch_s: float = 0.0,
    graph_gap_s: float = 0.0,
    replay_s: float = 0.0,
    latency_s: float = 1e-3,
    bandwidth: float = GIGA,
    slowdown: tuple[float, float] = (1.0, 1.0),
    timings: Mapping[str, float] | None = None,
    cores: int = 2,
    memory_bytes: int = 8 << 30,
    num_gpus: int = 2,
    worker_rates: Mapping[int, float] | None = None,
) -> Machine:
    """A machine of round numbers: everything runs at `rate`, per worker, in every setting.

    `worker_rates` overrides the rate by number of workers (CPU workers share caches and memory).
    """
    settings = make_settings(device, cores) if settings is None else settings
    phases = {
        "forward": dispatch_s,
        "backward": dispatch_s,
        "optimizer": dispatch_s,
        "launch": launch_s,
        "graph_kernel": graph_gap_s,
        "graph_replay": replay_s,
    }
    several = [s for s in settings if s.workers > 1]
    return Machine(
        fingerprint="test",
        measured_at="2026-01-01",
        host=make_host(cores, memory_bytes),
        devices=make_devices(num_gpus if device == "cuda" else 0, memory_bytes),
        ceilings=tuple(
            c for s in settings for c in make_ceilings(s, (worker_rates or {}).get(s.workers, rate))
        ),
        dispatch=tuple(
            Dispatch(device=device, phase=phase, seconds=measured(seconds, "s"))
            for phase, seconds in phases.items()
        ),
        collectives=tuple(
            make_collective(s, latency_s, bandwidth, operation)
            for s in several
            for operation in ("all_reduce", "broadcast")
        ),
        overlaps=tuple(
            Overlap(
                setting=s,
                compute_slowdown=measured(slowdown[0], "x"),
                communication_slowdown=measured(slowdown[1], "x"),
            )
            for s in several
        ),
        timings=tuple(
            OperatorTiming(setting=s, key=key, seconds=measured(seconds, "s"))
            for s in settings
            for key, seconds in (timings or {}).items()
        ),
    )


def make_op(
    phase: str,
    *,
    flops: int = 0,
    num_bytes: int = 0,
    family: str = "matmul",
    name: str = "aten.mm.default",
    number: int = 0,
    dtype: str = "float32",
) -> Op:
    """An operator with so much work; `number` makes its key unlike others'."""
    tensor = TensorSpec(shape=(number + 1,), stride=(1,), dtype=dtype)
    return Op(
        name=name,
        phase=phase,
        module=f"layer{number}",
        family=family,
        dtype=dtype,
        inputs=(tensor,),
        outputs=(tensor,),
        arguments="[]",
        flops=flops,
        bytes_read=num_bytes - num_bytes // 2,
        bytes_written=num_bytes // 2,
    )


def make_workload(
    *,
    forward: Sequence[int] = (1_000_000,) * 4,
    backward: Sequence[int] = (2_000_000,) * 4,
    optimizer: Sequence[int] = (500_000,),
    gradient_bytes: Sequence[int] | None = None,
    device: str = "cpu",
    samples: int = 8,
    buffer_bytes: int = 0,
    activation_bytes: int = 1 << 20,
    name: str = "toy",
) -> Workload:
    """A step with one matmul per given number of FLOP, and one gradient after each op of backward.

    The last op of forward is the first whose gradient is ready, as in a chain of layers.
    """
    phased = [
        *(("forward", flops) for flops in forward),
        *(("backward", flops) for flops in backward),
        *(("optimizer", flops) for flops in optimizer),
    ]
    ops = [make_op(phase, flops=flops, number=n) for n, (phase, flops) in enumerate(phased)]
    sizes = (1 << 20,) * len(backward) if gradient_bytes is None else tuple(gradient_bytes)
    first = len(forward)
    parameters = tuple(
        Parameter(
            name=f"p{number}",
            shape=(size // 4,),
            dtype="float32",
            num_bytes=size,
            is_trainable=True,
            ready_op=first + min(number, len(backward) - 1),
        )
        for number, size in enumerate(sizes)
    )
    total = sum(sizes)
    return Workload(
        name=name,
        device=device,
        samples=samples,
        batch=(TensorSpec(shape=(samples, 4), stride=(4, 1), dtype="float32", role="batch"),),
        ops=tuple(ops),
        parameters=tuple(reversed(parameters)),
        ready_order=tuple(p.name for p in parameters),
        buffer_bytes=buffer_bytes,
        memory=tuple(
            MemoryPoint(
                op=index,
                parameter_bytes=total,
                gradient_bytes=total if index >= first else 0,
                state_bytes=0,
                activation_bytes=activation_bytes,
            )
            for index in range(len(ops))
        ),
    )


def make_timeline(
    spans: Sequence[tuple[str, str, int, int]],
    *,
    origin: str = "measured",
    steps_ns: Sequence[int] | None = None,
    workers: int = 1,
    counters: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> Timeline:
    """A timeline of frames (name, lane, start, end); one step as long as the last end."""
    frames = tuple(Span(name=n, lane=lane, start_ns=s, end_ns=e) for n, lane, s, e in spans)
    end = max((span.end_ns for span in frames), default=0)
    return Timeline(
        origin=origin,
        title="toy",
        workers=workers,
        spans=frames,
        steps_ns=tuple(steps_ns) if steps_ns is not None else (end,),
        counters=dict(counters or {}),
        notes=tuple(notes),
    )


durations_ns = st.integers(0, 1_000_000)

sim_tasks = st.lists(
    st.builds(
        SimTask,
        name=st.sampled_from("abcdef"),
        lane=st.sampled_from(LANES),
        duration_ns=durations_ns,
        reads=st.lists(st.sampled_from("uvwxyz"), max_size=2, unique=True).map(tuple),
        writes=st.lists(st.sampled_from("uvwxyz"), max_size=2, unique=True).map(tuple),
        release_ns=st.sampled_from((0, 0, 0, 1000, 500_000)),
        priority=st.integers(-1, 1),
    ),
    max_size=25,
)
"""Tasks with any dependencies on any lanes."""

workloads = st.builds(
    make_workload,
    forward=st.lists(st.integers(0, 5_000_000), min_size=1, max_size=6),
    backward=st.lists(st.integers(0, 5_000_000), min_size=1, max_size=6),
    optimizer=st.lists(st.integers(0, 1_000_000), min_size=1, max_size=2),
    gradient_bytes=st.lists(st.integers(1, 8 << 20), min_size=1, max_size=6),
    buffer_bytes=st.sampled_from((0, 4096)),
)
"""Small steps: chains of matmuls with gradients."""

machines = st.builds(
    make_machine,
    rate=st.floats(1e8, 1e11),
    dispatch_s=st.sampled_from((0.0, 1e-5)),
    latency_s=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e8, 1e11),
    slowdown=st.tuples(st.floats(1.0, 2.0), st.floats(1.0, 2.0)),
)
"""CPU machines with two cores."""


@st.composite
def timelines(draw: st.DrawFn, origin: str = "measured") -> Timeline:
    """Frames in order on compute and communication, with gaps, and several steps."""
    spans: list[tuple[str, str, int, int]] = []
    ends = []
    for lane, names in (
        ("host", ("input",)),
        ("compute", ("forward", "backward/0", "backward/1", "wait", "optimizer")),
        ("communication", ("all_reduce/0",)),
    ):
        at = 0
        for name in names:
            start = at + draw(st.integers(0, 1000))
            at = start + draw(st.integers(0, 100_000))
            spans.append((name, lane, start, at))
        ends.append(at)
    step = max(*ends, 1) + draw(st.integers(0, 1000))
    others = draw(st.lists(st.integers(0, 1000), max_size=3))
    return make_timeline(
        spans,
        origin=origin,
        workers=2,
        steps_ns=(step, *(step + extra for extra in others)),
    )
