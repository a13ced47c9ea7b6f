"""Loads by stride: which words are read, and that no line is read twice before all were."""

import ctypes
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.probe import native
from ridgeline.probe.host import strides
from ridgeline.probe.host.memory_levels import LINE_BYTES
from ridgeline.probe.host.strides import StrideReader, measure_strides

ADDRESS = 1 << 20


class Recorder:
    """A library whose loops note the addresses that they would read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def ridgeline_stride(self, address: int, count: int, stride: int, repeats: int) -> float:
        self.read += [address + 8 * stride * index for index in range(count)] * repeats
        return 1e-9 * count

    def ridgeline_draw(self, address: int, count: int, stride: int, loads: int, _: object) -> float:
        assert count & (count - 1) == 0
        self.read += [address, address + 8 * stride * (count - 1)]
        return 1e-9 * loads


def reader(num_bytes: int, stride_bytes: int) -> StrideReader:
    return StrideReader(SimpleNamespace(address=ADDRESS), num_bytes, stride_bytes)  # type: ignore[arg-type]


@given(st.integers(3, 12), st.integers(0, 4), st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_each_call_goes_on_where_the_last_one_ended(
    power: int, more: int, calls: list[int]
) -> None:
    """However loads are cut into calls, the words are the same: passes from low to high, in the memory."""
    stride = 1 << power
    num_bytes = stride << (6 + more)
    found = []
    for parts in (calls, [sum(calls)]):
        recorder = Recorder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(strides, "library", lambda recorder=recorder: recorder)
            one = reader(num_bytes, stride)
            taken = [one.in_order(loads) for loads in parts]
        assert sum(taken) == pytest.approx(1e-9 * sum(calls))
        found.append(recorder.read)
    assert found[0] == found[1]
    assert len(found[0]) == sum(calls)
    assert all(ADDRESS <= at <= ADDRESS + num_bytes - 8 for at in found[0])
    count = num_bytes // stride
    assert all(
        b - a == stride
        for place, (a, b) in enumerate(itertools.pairwise(found[0]), 1)
        if place % count
    )


@given(st.integers(6, 12))
def test_passes_take_other_lines_until_all_were_read(power: int) -> None:
    """Otherwise the few lines of a large stride would stay in a cache. Neighbours do not follow each other."""
    stride, recorder = 1 << power, Recorder()
    lines = stride // LINE_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strides, "library", lambda: recorder)
        one = reader(64 * stride, stride)
        for _ in range(lines):
            one.in_order(64)
    assert len({at // LINE_BYTES for at in recorder.read}) == len(recorder.read) == 64 * lines
    begins = [(at - ADDRESS) // LINE_BYTES for at in recorder.read[::64]]
    steps = {abs(b - a) for a, b in itertools.pairwise(begins)}
    assert lines <= 4 or 1 not in steps


@given(st.integers(3, 12))
def test_random_loads_stay_in_the_memory_and_change_lines_too(power: int) -> None:
    """The first and the last word that may be drawn, pass by pass."""
    stride, recorder = 1 << power, Recorder()
    num_bytes = 64 * stride
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strides, "library", lambda: recorder)
        one = reader(num_bytes, stride)
        for _ in range(80):
            assert one.at_random(1000) == pytest.approx(1e-6)
    assert all(ADDRESS <= at <= ADDRESS + num_bytes - 8 for at in recorder.read)
    assert len(set(recorder.read[::2])) == min(80, max(1, stride // LINE_BYTES))


def test_what_strides_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stride has as many samples as there are rounds, all of them above nothing."""
    monkeypatch.setattr(strides, "ROUNDS", 3)
    monkeypatch.setattr(strides, "LEAST_S", 0.0)
    monkeypatch.setattr(strides, "SHORT_S", 1e-5)
    found = measure_strides(1 << 20)
    assert found.num_bytes == 1 << 20
    assert [point.stride_bytes for point in found.points] == [1 << power for power in range(3, 13)]
    for point in found.points:
        for seconds in (point.in_order, point.at_random):
            assert seconds.n == len(seconds.samples) == 3
            assert min(seconds.samples) > 0.0
            assert seconds.unit == "s"


def test_drawn_words_follow_the_generator() -> None:
    """The state goes on from call to call, so that no call draws what the one before it drew."""
    words, state = (ctypes.c_uint64 * 64)(), ctypes.c_uint64(5)
    draw, expected = native.library().ridgeline_draw, 5
    for loads in (3, 4):
        assert draw(ctypes.addressof(words), 8, 8, loads, ctypes.byref(state)) >= 0.0
        for _ in range(loads):
            expected = (expected * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        assert state.value == expected
