"""Results to the host: in order, asked for ahead, errors at their place."""

from collections.abc import Iterator

import pytest
import torch
from simulated_channel import SimulatedChannel
from torch import Tensor

from ridgeline.errors import PlanError
from ridgeline.feeding import to_host
from ridgeline.feeding.results import ToHost


def test_what_is_on_the_host_passes_as_it_is() -> None:
    """The same tensors and the same other leaves, in the same nests."""
    results = [{"r": torch.ones(2), "i": i} for i in range(3)]
    got = list(to_host(results))
    assert [g["i"] for g in got] == [0, 1, 2]
    assert all(g["r"] is r["r"] for g, r in zip(got, results, strict=True))


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_error_comes_after_the_results_before_it(depth: int) -> None:
    """Unchanged, and the stream is over."""
    error = ValueError("no more")

    def results() -> Iterator[Tensor]:
        yield torch.zeros(1)
        yield torch.ones(1)
        raise error

    stream = to_host(results(), depth)
    assert [float(next(stream)), float(next(stream))] == [0.0, 1.0]
    with pytest.raises(ValueError, match="no more") as raised:
        next(stream)
    assert raised.value is error
    assert list(stream) == []


def test_the_next_results_are_asked_for_before_one_is_waited_for() -> None:
    """`depth` of them, and no more."""
    asked: list[int] = []

    def results() -> Iterator[Tensor]:
        for index in range(10):
            asked.append(index)
            yield torch.tensor(index)

    stream = to_host(results(), 3)
    next(stream)
    assert asked == [0, 1, 2, 3]
    next(stream)
    assert asked[-1] == 4
    stream.close()
    assert list(stream) == []


def test_memory_that_is_computed_into_again_is_refused() -> None:
    """Its copy would show the next result; a clone is fine, and so are parts of one tensor."""
    memory = torch.zeros(3)
    with pytest.raises(
        PlanError, match=r"wanted every result in memory of its own, got \(3,\) float32 .* clone"
    ):
        list(to_host(memory.add_(1) for _ in range(3)))
    clones = list(to_host(memory.add_(1).clone() for _ in range(3)))
    assert [float(c[0]) for c in clones] == [3.0, 4.0, 5.0]
    assert len(list(to_host(iter(torch.zeros(4, 2))))) == 4
    assert len(list(to_host((memory.add_(1) for _ in range(3)), depth=0))) == 3


def test_results_that_are_kept_have_memory_of_their_own() -> None:
    """The ring is as deep as needed, and what is held is counted."""
    stream = ToHost((torch.full((2,), float(i)) for i in range(8)), 1, SimulatedChannel(0))
    kept = list(stream)
    assert [float(k[0]) for k in kept] == list(range(8))
    assert len({k.data_ptr() for k in kept}) == 8
    report = stream.report()
    assert (report.direction, report.batches, report.num_bytes) == ("out", 8, 64)
    assert report.given_away == 8 - 3
    assert repr(report).startswith("to_host on cpu: 8 results, 64 B copied at ")
    channel = SimulatedChannel(0)
    stream = ToHost((torch.full((2,), float(i)) for i in range(8)), 1, channel)
    for result in stream:
        assert result.numel() == 2
        channel.drain()
    assert stream.report().given_away == 0
    assert len(channel.addresses) == 3


def test_gradients_stay_behind() -> None:
    """What comes to the host is detached."""
    weight = torch.ones(2, requires_grad=True)
    (got,) = ToHost([weight * 2], 1, SimulatedChannel(0))
    assert not got.requires_grad
    assert got.tolist() == [2.0, 2.0]


def test_a_depth_out_of_range_is_refused() -> None:
    """Checked at the call."""
    with pytest.raises(
        PlanError, match=r"wanted a whole depth >= 0, got -1 in to_host\(\.\.\.\); 2 serves"
    ):
        to_host([], -1)
    with pytest.raises(PlanError, match=r"wanted a depth of at most 65536, got 10{30} in to_host"):
        to_host([], 10**30)


def test_what_cannot_be_iterated_is_refused() -> None:
    """By name, as `feed` refuses it."""
    with pytest.raises(PlanError) as refused:
        to_host(3)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "wanted an iterable of results, got int in to_host(...); pass a generator or a list"
    )
