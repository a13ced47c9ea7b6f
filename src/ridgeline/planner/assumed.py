"""Rates to plan with where nothing was measured: rough, so that trials decide, and marked as assumed."""

import msgspec

from ridgeline.machine import Ceiling, Collective, Dispatch, Machine, Quantity, Setting, SizePoint
from ridgeline.synchronisation import bucket_operations

FLOPS = {"cpu": {"float32": 5e10}, "cuda": {"float32": 4e13, "bfloat16": 4e14, "float16": 4e14}}
"""Of products, by dtype. By data sheets an A100 makes 20 and 310 TFLOP/s, an H100 67 and 990."""
BYTES_PER_S = {"cpu": 1e10, "cuda": 2e12}
"""Two cores of a CPU, and a GPU of a data centre, in their order of magnitude."""
DISPATCH_S = 8e-6
LATENCY_S = {"cpu": 3e-4, "cuda": 3e-5}
NETWORK_BYTES_PER_S = {"cpu": 1e9, "cuda": 1e11}
_SIZES = (1 << 10, 1 << 20, 1 << 30)


def with_assumed_rates(machine: Machine, setting: Setting, why: str) -> Machine:
    """The machine, with assumed rates for what a prediction at this setting needs and that was not measured.

    `why` it was not measured is the first of its warnings then.
    """
    device = setting.device
    has_ceilings = any(c.setting == setting for c in machine.ceilings)
    known = {entry.phase for entry in machine.dispatch if entry.device == device}
    # Phase by phase: a profile may have some of them, which say more than what is assumed.
    phases: tuple[str, ...] = ("forward", "backward", "optimizer")
    if device == "cuda":
        # Only steps on a GPU are priced by what launches and replays take.
        phases = (*phases, "launch", "graph_replay", "graph_start", "graph_kernel")
    # By the number of workers alone: threads change a collective far less.
    has_collectives = setting.workers == 1 or any(
        c.setting.workers == setting.workers and c.setting.device == device
        for c in machine.collectives
    )
    return msgspec.structs.replace(
        machine,
        ceilings=machine.ceilings + (() if has_ceilings else _ceilings(setting)),
        dispatch=(
            *machine.dispatch,
            *(
                Dispatch(device=device, phase=phase, seconds=_seconds(phase))  # type: ignore[arg-type]
                for phase in phases
                if phase not in known
            ),
        ),
        collectives=machine.collectives + (() if has_collectives else _collectives(setting)),
        # First, since the ranking shows warnings in their order, and this one explains all others.
        warnings=tuple(dict.fromkeys((why, *machine.warnings))),
    )


def _ceilings(setting: Setting) -> tuple[Ceiling, ...]:
    rate = Quantity.assumed(BYTES_PER_S[setting.device], "B/s")
    return (
        *(
            # Only in the dtypes of the table: for another one costs fall back to float32, with a note.
            Ceiling(
                setting=setting,
                family="matmul",
                dtype=dtype,
                rate=Quantity.assumed(flops, "FLOP/s"),
            )
            for dtype, flops in FLOPS[setting.device].items()
        ),
        Ceiling(setting=setting, family="elementwise", dtype="float32", rate=rate),
        Ceiling(setting=setting, family="memory", dtype="float32", rate=rate),
    )


def _seconds(phase: str) -> Quantity:
    seconds = 1e-6 if phase == "graph_kernel" else DISPATCH_S
    return Quantity.assumed(seconds, "s")


def _collectives(setting: Setting) -> tuple[Collective, ...]:
    """Every collective of a bucket at one rate; what others take follows from these."""
    latency_s, rate = LATENCY_S[setting.device], NETWORK_BYTES_PER_S[setting.device]
    return tuple(
        Collective(
            setting=setting,
            operation=operation,
            backend="nccl" if setting.device == "cuda" else "gloo",
            # Over sizes far apart, so that both latency and bandwidth can be read off the table.
            table=tuple(
                SizePoint(num_bytes=size, seconds=Quantity.assumed(latency_s + size / rate, "s"))
                for size in _SIZES
            ),
        )
        for operation in bucket_operations(setting.device)
    )
