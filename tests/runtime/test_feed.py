"""Feeding: the loader's batches, in order, errors where they happen, nothing left running."""

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import PlanError
from ridgeline.runtime.feed import feed


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 5))
def test_order_and_content_are_those_of_the_loader(length: int, depth: int) -> None:
    """Whatever the depth, the batches come once each and in order."""
    loader = [{"x": torch.full((2,), i)} for i in range(length)]
    got = [int(batch["x"][0]) for batch in feed(loader, "cpu", depth)]
    assert got == list(range(length))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_loaders_error_comes_unchanged_at_its_batch(depth: int) -> None:
    """Two good batches first, then the original exception."""

    def loader() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("damaged sample")

    batches = feed(loader(), "cpu", depth)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ValueError, match="damaged sample"):
        next(batches)


def test_breaking_off_ends_the_thread() -> None:
    """A consumer that stops early leaves no loader thread behind."""
    before = threading.active_count()
    batches = feed(iter(range(1000)), "cpu", 3)
    assert next(batches) == 0
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_it_runs_ahead_by_depth_and_no_further() -> None:
    """When the consumer holds batch 0, at most depth further batches were taken."""
    taken: list[int] = []
    gate = threading.Event()

    def loader() -> Iterator[int]:
        for index in range(10):
            taken.append(index)
            if index == 3:
                gate.set()
            yield index

    batches = feed(loader(), "cpu", 3)
    next(batches)
    assert gate.wait(30)
    batches.close()  # type: ignore[attr-defined]
    assert taken[-1] <= 3


def test_a_negative_depth_is_refused() -> None:
    """Checked at the call, before anything is loaded."""
    with pytest.raises(PlanError, match="wanted depth >= 0, got -1 in feed"):
        feed([], "cpu", -1)
