"""Codecs are timed by what a worker of a step does for a bucket, and a profile without them is completed."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.machine import Setting
from ridgeline.probe.apart import without_timings
from ridgeline.probe.findings import Findings
from ridgeline.probe.groups.group import run_in_group
from ridgeline.probe.missing import merge, requests
from ridgeline.runtime.sync.rehearsal import rehearsal
from ridgeline.synchronisation import COMPRESSIONS, offered_compressions
from strategies import make_codec_timing, make_machine

TWO = Setting(device="cpu", workers=2, threads=1)
NAMES = tuple(name for name in offered_compressions("cpu") if COMPRESSIONS[name].codec)


def test_every_codec_is_timed() -> None:
    """Each has a size table, and what it and computing take beside each other; a broken one has a warning."""
    reply = run_in_group("probe_targets:codec_survey", b"", workers=2, threads=1, device="cpu")
    found = msgspec.json.decode(reply, type=Findings)
    assert tuple(timing.compression for timing in found.codecs) == NAMES
    for timing in found.codecs:
        assert timing.setting == TWO
        small, large = timing.table
        assert (small.num_bytes, large.num_bytes) == (4 * 64 * 64, 4 * 512 * 512)
        assert small.seconds.n == large.seconds.n == 16
        for point in timing.table:  # by that clock
            assert {point.seconds.low, point.seconds.high} == {point.num_bytes / 4}
        assert timing.compute_slowdown.value >= 1.0
        assert timing.codec_slowdown.value >= 1.0
    (warning,) = found.warnings
    assert warning.startswith(
        "encoding bf16 gradients was not timed: PlanError: wanted an entry whose"
    )


@pytest.mark.parametrize("name", NAMES)
@given(workers=st.integers(1, 3), side=st.integers(1, 20))
def test_a_rehearsal_can_be_repeated(name: str, workers: int, side: int) -> None:
    """Whatever the number of workers and the shapes, nothing is drawn or kept that ends it."""
    work = rehearsal(name, [(side, 2 * side), (side,), (4, side, 3)], workers, torch.device("cpu"))
    for _ in range(3):
        work()


def test_a_profile_without_codecs_has_them_measured() -> None:
    """Once, for several workers on CPUs, and by the workers that are there."""
    machine = make_machine()
    wanted = [Setting(device="cpu", workers=1, threads=2), TWO]
    (request,) = requests(machine, wanted, quick=True, workload=None)
    assert request.codecs == (TWO,)
    assert request.settings == (TWO,)
    alone, apart = without_timings(request)
    assert alone == request
    assert apart is None
    timing = make_codec_timing(TWO, NAMES[0])
    known = merge(machine, Findings(codecs=(timing,)))
    assert known.codecs == (timing,)
    assert requests(known, wanted, quick=True, workload=None) == ()
    assert requests(machine, wanted, quick=True, workload=None, codecs=False) == ()
