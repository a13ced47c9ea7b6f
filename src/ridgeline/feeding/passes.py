"""Passes over a feed: one at a time, each from the first batch on, and what is said where there is none."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ridgeline.errors import PlanError


class Pass(Iterator[Any]):
    """An iterator over one pass of a feed, which several threads may share."""

    def __init__(self, next_of: Callable[[int], Any], number: int) -> None:
        self._next_of, self._number = next_of, number

    def __next__(self) -> Any:
        """The next batch of this pass; raises what `FeedStream.next_of` does."""
        return self._next_of(self._number)


def check_pass(number: int, present: int) -> None:
    """Raise a PlanError for a pass that is not the present one."""
    if number != present:
        raise PlanError(
            f"wanted the next batch of pass {number + 1}, got a feed in pass {present + 1}, which has one "
            "at a time; iterate a feed of its own for each loop, or let threads share one iter(feed)"
        )


def closed() -> PlanError:
    """A pass over a closed feed."""
    return PlanError(
        "wanted to iterate over a feed, got one that is closed; iterate inside its with block or before "
        "close(), or make another with feed(...)"
    )


def no_more(loader: Any, num_batches: int) -> PlanError:
    """A further pass over what is its own iterator."""
    return PlanError(
        f"wanted another pass over the batches, got {type(loader).__name__}, which gives one and ended after "
        f"{num_batches} batch{'es' * (num_batches != 1)}, in feed(...); pass what can be iterated again, "
        "such as a DataLoader or a list, or make a loader and a feed for every pass"
    )


def given_out(loader: Any, num_batches: int) -> PlanError | None:
    """An empty pass after others that were not, unless the loader says that it is empty.

    Wrappers of a generator (progress bars, say) begin again, but with nothing.
    """
    with contextlib.suppress(TypeError, NotImplementedError):  # it has no length
        if len(loader) == 0:
            return None
    return no_more(loader, num_batches) if num_batches else None
