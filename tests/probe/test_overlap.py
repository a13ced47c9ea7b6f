"""What workers that are slowed unevenly make of a step."""

from types import SimpleNamespace
from typing import Any

from ridgeline.probe.overlap import _slowest


def test_the_slowest_worker_of_each_round_counts() -> None:
    """All wait for it, whoever it is."""
    peers: Any = SimpleNamespace(gather=lambda mine: [mine, [3.0, 1.5, 2.0]])
    found = _slowest([1.0, 2.5, 2.0], "x", peers)
    assert (found.value, found.low, found.high, found.n) == (2.5, 2.25, 2.75, 3)
