"""The sample machine: two cores, each number with a spread. Durations of the sample steps follow from it."""

import math

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
from ridgeline.machine.quantity import Sampled

SETTING = Setting(device="cpu", workers=2, threads=1)
MATMUL = 61e9
CONVOLUTION = 48e9
MEMORY = 9.4e9


def sampled(value: float, unit: str) -> Sampled:
    """A number with quartiles 10 % apart."""
    return Sampled.measured([value * share for share in (0.9, 0.95, 1.0, 1.05, 1.1)], unit)


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
