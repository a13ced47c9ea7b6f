"""Handing batches over: a loading thread only where it shortens the step, and batches in order either way."""

import threading
from collections.abc import Iterator

import pytest
import torch

from ridgeline.feeding import Handover, feed
from ridgeline.feeding.handover import LOOKS, MUCH_S, SKIPPED, TURNS

TURN = SKIPPED + LOOKS


def decided(*, load_s: float, in_place_s: float, threaded_s: float) -> tuple[bool, int]:
    """What comes of steps that take so long with and without a thread, and after how many steps."""
    handover, last = Handover(), 0
    for step in range(3 * TURNS * TURN):
        before = handover.uses_thread
        handover.note(threaded_s if before else in_place_s, load_s)
        if handover.uses_thread != before:
            last = step + 1
    return handover.uses_thread, last


@pytest.mark.parametrize(
    ("load_s", "threaded_s", "uses_thread", "last"),
    [
        (1e-6, 0.5e-3, False, 0),  # nothing to gain
        (2 * MUCH_S, 9e-3, True, TURN),  # much to hide
        (0.1e-3, 0.9e-3, True, 3 * TURN),  # it hides most of it
        (0.1e-3, 1.2e-3, False, 4 * TURN),  # handing over costs more
        (0.1e-3, 0.99e-3, False, 4 * TURN),  # too close to tell
    ],
)
def test_a_thread_is_kept_where_it_shortens_the_step(
    load_s: float, threaded_s: float, uses_thread: bool, last: int
) -> None:
    """Steps of 1 ms in place, in turns with others; then nothing changes any more."""
    found = decided(load_s=load_s, in_place_s=1e-3, threaded_s=threaded_s)
    assert found == (uses_thread, last)


class Switching(Handover):
    """Says with or without a thread by a list, whatever a step takes."""

    def __init__(self, pattern: list[bool]) -> None:
        super().__init__()
        self._pattern = iter(pattern)

    def note(self, step_s: float, load_s: float) -> None:
        self.uses_thread = next(self._pattern, self.uses_thread)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_come_in_order_through_every_change(depth: int) -> None:
    """Each once, from whichever thread; none is left when the feed is over."""
    threads: set[str] = set()

    def loader() -> Iterator[torch.Tensor]:
        for index in range(60):
            threads.add(threading.current_thread().name)
            yield torch.tensor(index)

    before = {*threading.enumerate()}
    pattern = [(step // 7) % 2 == 1 for step in range(60)]
    with feed(loader(), "cpu", depth, handover=Switching(pattern)) as batches:
        assert [int(batch) for batch in batches] == list(range(60))
    assert {*threading.enumerate()} <= before
    assert (len(threads) > 1) is (depth > 0)


def test_closing_amid_a_change_leaves_no_thread() -> None:
    """A thread that has begun but not loaded yet ends with the feed."""
    before = {*threading.enumerate()}
    with feed(iter(range(9)), "cpu", 2, handover=Switching([True])) as batches:
        assert [next(batches), next(batches)] == [0, 1]
    assert {*threading.enumerate()} <= before


def test_an_error_after_a_change_comes_at_its_batch() -> None:
    """Unchanged, and after the batches before it."""

    def loader() -> Iterator[int]:
        yield from range(5)
        raise ValueError("damaged sample")

    batches = feed(loader(), "cpu", 2, handover=Switching([True]))
    assert [next(batches) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="damaged sample"):
        next(batches)


def test_feeds_of_a_run_share_what_was_found() -> None:
    """The second epoch begins as the first one ended."""
    handover = Handover()
    handover.uses_thread = True
    names: list[str] = []

    def loader() -> Iterator[int]:
        names.append(threading.current_thread().name)
        yield 1

    assert list(feed(loader(), "cpu", 2, handover=handover)) == [1]
    assert names != [threading.current_thread().name]


def test_batches_of_a_list_are_there_already() -> None:
    """No thread hands them over on the CPU."""
    before = {*threading.enumerate()}
    batches = feed([1, 2, 3], "cpu", 2)
    assert next(batches) == 1
    assert {*threading.enumerate()} <= before
    assert list(batches) == [2, 3]
