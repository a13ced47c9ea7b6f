"""Blocks that threads move: each once, ended by errors and interrupts, and rates that are those of all threads."""

import _thread
import ctypes
import errno
import itertools
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.probe.files.blocks import BlockSpan, moved, one_by_one, pages, rate_of, seconds_of
from ridgeline.probe.files.storage import BLOCK_BYTES, PIECE_BYTES


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_every_block_is_moved_once(counts: list[int]) -> None:
    """By the thread whose it is, in its order; the spans come in the order of their ends."""
    seen: dict[int, list[int]] = {}

    def act(memory: memoryview, place: int) -> None:
        assert len(memory) == 4096
        seen.setdefault(threading.get_ident() if len(counts) > 1 else 0, []).append(place)

    places = [range(1000 * first, 1000 * first + count) for first, count in enumerate(counts)]
    spans = moved(one_by_one(act), places, 4096)
    assert sorted(itertools.chain(*seen.values())) == sorted(itertools.chain(*places))
    assert len(spans) == sum(counts)
    assert [span.ended_s for span in spans] == sorted(span.ended_s for span in spans)
    assert all(span.begun_s <= span.ended_s for span in spans)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 5))
def test_spans_come_in_the_order_of_their_ends(ends: list[int], batch: int) -> None:
    """Threads hand over several blocks at once, and not in the order of time."""

    def step(memory: memoryview, places: Sequence[int], limit_s: float) -> list[float]:
        assert len(places) <= batch
        return [time_s for place in places for time_s in (place - 0.5, float(place))]

    halves = [ends[::2], ends[1::2]]
    spans = moved(step, halves, 4096, batch=batch)
    assert spans == [BlockSpan(end - 0.5, float(end)) for end in sorted(ends)]


def test_time_that_is_over_leaves_every_thread_its_first_block() -> None:
    """A drive that hangs for a while still has a figure."""
    assert (
        len(
            moved(
                one_by_one(lambda memory, place: None), [itertools.count()] * 4, 4096, limit_s=0.0
            )
        )
        == 4
    )


def test_a_thread_that_fails_ends_the_others() -> None:
    """They would go on for ever; what the one found is raised."""

    def act(memory: memoryview, place: int) -> None:
        if place == 7:
            raise OSError(errno.EIO, "drive")

    before = {*threading.enumerate()}
    with pytest.raises(OSError, match="drive"):
        moved(one_by_one(act), [itertools.repeat(0), itertools.count(), itertools.repeat(1)], 4096)
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_an_interrupt_ends_the_threads(depth: int) -> None:
    """Ctrl-C reaches the thread that waits, or works alone; those that read end with their blocks."""
    told = threading.Event()

    def act(memory: memoryview, place: int) -> None:
        if not told.is_set():
            told.set()
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        moved(one_by_one(act), [itertools.repeat(0)] * depth, 4096)
    assert all(not thread.name.startswith("Thread-") for thread in threading.enumerate())


@pytest.mark.parametrize("num_bytes", [BLOCK_BYTES, PIECE_BYTES, 3 * PIECE_BYTES])
def test_memory_begins_at_a_large_page(num_bytes: int) -> None:
    """All of it can be written, and nothing refers to it afterwards."""
    with pages(num_bytes) as memory:
        assert len(memory) == num_bytes
        first = ctypes.c_char.from_buffer(memory)
        assert ctypes.addressof(first) % (2 << 20) == 0
        del first
        memory[:] = bytes(range(256)) * (num_bytes // 256)
        assert memory[-1] == 255
    with pytest.raises(ValueError, match="released"):
        memory[0]


@given(
    st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=100),
    st.integers(1, 1 << 30),
)
def test_rates_are_of_all_the_blocks(gaps: list[float], num_bytes: int) -> None:
    """Ten samples, or one a block; no sample is faster than the fastest block, nor slower than the slowest."""
    ends = list(itertools.accumulate(gaps))
    spans = [BlockSpan(begun, end) for begun, end in itertools.pairwise((0.0, *ends))]
    rate = rate_of(spans, num_bytes)
    assert rate.unit == "B/s"
    assert rate.n == min(10, len(gaps))
    fastest, slowest = num_bytes / min(gaps), num_bytes / max(gaps)
    assert slowest * 0.999 <= rate.low <= rate.value <= rate.high <= fastest * 1.001


@given(st.floats(1e-5, 1.0), st.integers(1, 200), st.integers(1, 16))
def test_steady_threads_move_as_many_times_as_there_are(
    each_s: float, rounds: int, depth: int
) -> None:
    """A block takes as long as it takes; so many threads move so many times as much."""
    spans = [
        BlockSpan(each_s * turn, each_s * (turn + 1))
        for turn in range(rounds)
        for _ in range(depth)
    ]
    assert seconds_of(spans).value == pytest.approx(each_s)
    if rounds % 10 == 0:
        assert rate_of(spans, 4096).value == pytest.approx(depth * 4096 / each_s)
