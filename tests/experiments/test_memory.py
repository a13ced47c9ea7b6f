"""The experiment `memory`: which stair stands for which level, and what cannot be held says why."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from printed import as_text
from ridgeline.codec import decode, encode
from ridgeline.errors import TaskError
from ridgeline.experiments.memory import run
from ridgeline.experiments.memory.levels import level_latencies
from ridgeline.experiments.memory.loopback import loopback_latency
from ridgeline.experiments.memory.result import MemoryExperiment
from ridgeline.experiments.memory.storage import storage_latencies
from ridgeline.experiments.memory.text import experiment_text
from ridgeline.machine import Quantity
from ridgeline.machine.stairs import Stair
from ridgeline.probe.host.caches import Cache
from ridgeline.probe.host.staircase import sizes, stand_in, stand_ins

CACHES = (Cache(1, 48 << 10), Cache(2, 2 << 20), Cache(3, 32 << 20))


def stairs(*given_sizes: int) -> tuple[Stair, ...]:
    """A load costs as many nanoseconds as the logarithm of the bytes."""

    def quantity(value: float) -> Quantity:
        return Quantity.measured([value * 0.9, value, value * 1.1], "s")

    return tuple(
        Stair(
            num_bytes=size,
            access_s=quantity(1e-9 * size.bit_length()),
            word_s=quantity(1e-10 * size.bit_length()),
            line_s=quantity(2e-10 * size.bit_length()),
        )
        for size in given_sizes
    )


@given(
    st.lists(st.integers(10, 30), max_size=3, unique=True).map(sorted),
    st.integers(1 << 14, 1 << 34),
    st.booleans(),
)
def test_sizes_reach_beyond_the_caches(powers: list[int], most: int, quick: bool) -> None:
    """Ascending powers of two within the room, beyond the largest cache where that fits, with every level."""
    known = [Cache(level, 3 << power) for level, power in enumerate(powers, 1)]
    found = sizes(known, most, quick=quick)
    assert list(found) == sorted(set(found))
    assert all(size & (size - 1) == 0 and size >= 4096 for size in found)
    assert found[-1] <= max(most, 1 << 16)
    largest = max((cache.num_bytes for cache in known), default=64 << 20)
    if most >= 4 * largest and largest >= 1 << 14:
        assert found[-1] > 2 * largest
        assert {size for size in stand_ins(known) if size >= 4096} <= set(found)


@given(st.integers(1 << 10, 1 << 40), st.integers(0, 1 << 40))
def test_what_stands_for_a_level(num_bytes: int, below: int) -> None:
    """A power of two that leaves half of the cache free, and most of which the caches before it do not hold."""
    size = stand_in(Cache(2, num_bytes), below)
    assert size & (size - 1) == 0
    assert size <= num_bytes // 2
    assert size >= 4 * below or 4 * size > num_bytes
    if below and 8 * below <= num_bytes // 2:
        assert 4 * below <= size < 8 * below


def test_each_level_has_its_stair() -> None:
    """Sets beyond the caches before it for each hit; the largest set for memory, one access and one word in a burst."""
    found = level_latencies(CACHES, stairs(*sizes(CACHES, 1 << 34, quick=True)))
    nanoseconds = {one.name: round(1e9 * one.measured.value, 1) for one in found}
    assert nanoseconds == {
        "load that hits L1": 15,
        "load that hits L2": 19,
        "load that hits L3": 24,
        "load from main memory": 28,
        "next word in a burst": 2.8,
        "word of the next line": 5.6,
    }
    assert [one.textbook_s for one in found] == [1.5e-9, 5e-9, 16e-9, 100e-9, 0.2e-9, None]


def test_without_room_memory_is_not_named_after_a_cache() -> None:
    """Where the largest set fits into the caches, no figure stands for main memory."""
    found = level_latencies(CACHES, stairs(1 << 14, 1 << 18, 1 << 23, 1 << 24))
    reasons = {one.name: one.reason for one in found if one.measured is None}
    wanted = "16.0 MiB were walked through, and caches hold 32.0 MiB"
    assert reasons == dict.fromkeys(
        ("load from main memory", "next word in a burst", "word of the next line"), wanted
    )


@pytest.mark.parametrize(
    ("code", "is_direct", "reason"),
    [
        (errno.EINVAL, True, "the file system of {folder} allows no direct I/O"),
        (errno.ENOSPC, True, "{folder} has no room for 2.00 MiB"),
        (errno.ENOSPC, False, "{folder} has no room for 2.00 MiB"),
    ],
)
def test_storage_that_cannot_be_read_past_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, is_direct: bool, reason: str
) -> None:
    """It says so, at its first block or later, and leaves nothing behind."""
    written = os.pwrite

    def refuse(file: int, part: object, place: int) -> int:
        if is_direct or place:
            raise OSError(code, os.strerror(code))
        return written(file, part, place)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", refuse)
    found = storage_latencies(tmp_path, 2 << 20, 4)
    assert {one.reason for one in found} == {reason.format(folder=tmp_path)}
    assert list(tmp_path.iterdir()) == []


def test_other_faults_of_storage_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A drive that fails is no reason to go on."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "drive")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="drive"):
        storage_latencies(tmp_path, 2 << 20, 4)
    assert list(tmp_path.iterdir()) == []


def test_storage_is_read_or_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many samples as reads, no file afterwards, and no name of a user in what is shared."""
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for one in storage_latencies(tmp_path, 2 << 20, 5):
        assert (one.measured is None) == bool(one.reason)
        assert one.measured is None or one.how.endswith(f" in ~/{tmp_path.name}")
        assert one.measured is None or one.measured.n == 5
    assert list(tmp_path.iterdir()) == []


def test_a_packet_comes_back() -> None:
    """Every round trip is a sample; the other process has ended."""
    found = loopback_latency(20)
    assert found.measured.n == 20
    assert 0.0 < found.measured.low <= found.measured.value


def test_parts_by_name() -> None:
    """One part alone makes no staircase; an unknown one is refused."""
    found = run(quick=True, only=("loopback",))
    assert [one.name for one in found.latencies] == ["4 KiB to another process, over loopback"]
    assert found.stairs == ()
    assert decode(MemoryExperiment, encode(found), where="file") == found
    with pytest.raises(TaskError) as refused:
        run(only=("tape",))
    assert str(refused.value) == (
        "wanted parts of the experiment memory, got 'tape'; known are levels, storage, loopback, gpu"
    )


def test_as_text() -> None:
    """Ends of caches are marked at the largest set that fits, and reasons stand where figures would."""
    made = stairs(1 << 14, 1 << 15, 1 << 20, 1 << 24, 1 << 25)
    found = run(quick=True, only=("loopback",))
    experiment = MemoryExperiment(
        **{name: getattr(found, name) for name in ("date", "host", "devices", "is_quick")},
        caches={f"L{cache.level}": cache.num_bytes for cache in CACHES},
        stairs=made,
        latencies=tuple(level_latencies(CACHES, made)),
        notes=("a note",),
    )
    text = as_text(experiment_text(experiment), width=200)
    (first,) = [line for line in text.splitlines() if "L1 ends" in line]
    assert first.split()[:2] == ["32.0", "KiB"]
    assert "not measured: 32.0 MiB were walked through, and caches hold 32.0 MiB" in text
    assert "! a note" in text


def test_without_a_gpu_its_rows_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The textbook's numbers stay, so that the table is the same everywhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = run(quick=True, only=("gpu",))
    assert [one.measured for one in found.latencies] == [None] * 5
    assert {one.reason for one in found.latencies} == {"there is no GPU"}
    assert [one.textbook_s for one in found.latencies] == [10e-6, None, 80e-6, 80e-6, 30e-6]
    assert "not measured: there is no GPU" in as_text(experiment_text(found), width=200)
