"""Ceilings that contradict each other are doubted in the profile's warnings."""

import msgspec
import pytest

from ridgeline.machine import Ceiling, Setting
from ridgeline.probe.findings import Findings
from ridgeline.probe.missing import merge
from ridgeline.probe.rates.doubts import doubts
from strategies import make_ceilings, make_machine


def ceiling(
    rate: float,
    *,
    workers: int = 1,
    threads: int = 1,
    family: str = "memory",
    dtype: str = "float32",
) -> Ceiling:
    setting = Setting(device="cpu", workers=workers, threads=threads)
    [found] = [c for c in make_ceilings(setting, rate) if c.family == family]
    return msgspec.structs.replace(found, dtype=dtype)


def test_many_threads_that_reach_less_than_half_of_one_are_doubted() -> None:
    """With both rates, and what to do."""
    ceilings = (ceiling(10e9), ceiling(0.1e9, threads=2))
    (warning,) = doubts(ceilings)
    assert warning == (
        "the ceiling of memory in float32 at 1 x 2 cpu threads is 100 MB/s in all, less than half of the "
        "10.0 GB/s that one thread reached alone: other programs most likely disturbed it; measure again "
        "with `ridgeline measure --refresh`"
    )
    machine = msgspec.structs.replace(make_machine(), ceilings=ceilings[:1])
    assert merge(machine, Findings(ceilings=ceilings[1:])).warnings == (warning,)


@pytest.mark.parametrize(
    "other",
    [
        ceiling(5e9, threads=2),
        ceiling(2.5e9, workers=2),
        ceiling(0.1e9, threads=2, family="elementwise"),
        ceiling(0.1e9, threads=2, dtype="bfloat16"),
    ],
)
def test_what_can_be_is_believed(other: Ceiling) -> None:
    """Rates count over all workers together, against the same work in the same type only."""
    assert doubts((other, ceiling(10e9))) == ()
    assert doubts((other,)) == ()
