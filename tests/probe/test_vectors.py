"""Multiply-adds by width of vectors: rates, the clock behind each sample, and widths that are not there."""

import platform

import pytest
import torch

from ridgeline.probe import native
from ridgeline.probe.host import vectors
from ridgeline.probe.host.vectors import measure_vectors, why_missing


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples, and short ones."""
    monkeypatch.setattr(vectors, "ROUNDS", 3)
    monkeypatch.setattr(vectors, "LEAST_S", 0.0)
    monkeypatch.setattr(vectors, "SHORT_S", 1e-5)
    monkeypatch.setattr(vectors, "CLOCK_TURNS", 100)


def test_rates_per_cycle_and_gains_follow_from_the_samples(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops of 1, 4 and 8 floats that take a nanosecond an operation, at a clock of 2 GHz."""
    monkeypatch.setattr(
        vectors,
        "multiply_adds",
        lambda: {bits: lambda operations: 1e-9 * operations for bits in (32, 128, 256)},
    )
    seconds = type("Library", (), {"ridgeline_additions": staticmethod(lambda turns: turns * 8e-9)})
    monkeypatch.setattr(vectors, "library", seconds)
    monkeypatch.setattr(vectors, "flags", lambda: frozenset({"avx512f"}))
    found = measure_vectors()
    assert [one.bits for one in found.rates] == [32, 128, 256]
    assert [one.rate.value for one in found.rates] == pytest.approx([2e9, 8e9, 16e9])
    assert [one.per_cycle.value for one in found.rates] == pytest.approx([1.0, 4.0, 8.0])
    assert [one.gain.value for one in found.rates] == pytest.approx([1.0, 4.0, 8.0])
    assert {one.rate.unit for one in found.rates} == {"FLOP/s"}
    assert all(len(one.rate.samples) == one.rate.n == 3 for one in found.rates)
    assert found.clock.value == pytest.approx(2e9)
    assert found.clock.n == 9
    assert found.missing == ("512 bit: the compiler makes no such instructions for this processor",)


def test_every_width_that_is_here_is_measured(short: None) -> None:
    """And of each other one it says why not; torch says what its own kernels use."""
    found = measure_vectors()
    assert [one.bits for one in found.rates] == list(native.multiply_adds())
    assert found.rates[0].bits == 32
    assert all(min(one.rate.samples) > 0.0 for one in found.rates)
    assert len(found.rates) + len(found.missing) == len(native.VECTOR_BITS)
    assert found.torch_capability == torch.backends.cpu.get_cpu_capability()


def test_why_a_width_is_missing() -> None:
    """What the processor lacks, or the compiler."""
    machine = platform.machine()
    assert why_missing(128, frozenset({"fp"})) == (
        f"128 bit: the processor ({machine}) has none of sse2, asimd"
    )
    assert why_missing(512, frozenset({"avx", "avx2"})) == (
        f"512 bit: the processor ({machine}) has none of avx512f"
    )
    assert why_missing(256, frozenset({"avx"})) == (
        "256 bit: the compiler makes no such instructions for this processor"
    )
