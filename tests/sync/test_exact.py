"""Every exact algorithm makes the mean: within rounding, in its own order, the same on all workers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exact_worker
import orders
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asked_workers import Workers
from ridgeline.plan import Sync
from ridgeline.runtime.sync.transports.ring import ALIGNED
from ridgeline.runtime.sync.transports.scaling import Scaling
from ridgeline.simulator.frames import step_frames
from ridgeline.synchronisation import wire_bytes
from ridgeline.synchronisation.rings import read, split

SIZES = (2, 3, 4)
PLANNED = "0,3,1,2:2;0,2,1,3:2;0,1,2,3:1"
WAYS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "ring": ("ring", {"pieces": 1}, SIZES),
    "ring, in pieces": ("ring", {"pieces": 3}, SIZES),
    "tree": ("tree", {}, SIZES),
    "rings": ("rings", {"pieces": 2}, SIZES),
    "rings of a plan": ("rings", {"orders": PLANNED, "pieces": 0}, (4,)),
    "hierarchical": ("hierarchical", {"local": 2, "pieces": 2}, (4,)),
}
"""Case to its algorithm, options, and numbers of workers."""
CASES = [(name, size) for name, (_, _, sizes) in WAYS.items() for size in sizes]
DTYPES = ("float32", "float64", "bfloat16", "float16")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One start for all that is asked here."""
    with Workers(Path(exact_worker.__file__)) as started:
        yield started


def modelled(name: str, values: list[Tensor]) -> Tensor:
    """The sum in the order of the algorithm."""
    algorithm, options, _ = WAYS[name]
    if algorithm == "tree":
        return orders.up_tree(values)
    if algorithm == "hierarchical":
        return orders.by_pairs(values)
    if algorithm == "ring":
        return orders.along_ring(values, range(len(values)), options["pieces"])
    rings = read(options.get("orders", ""), len(values))
    parts = split(values[0].numel(), [ring.bytes_per_s for ring in rings], ALIGNED)
    pieces = options["pieces"] or 1
    return torch.cat(
        [
            orders.along_ring([value[begin:end] for value in values], ring.order, pieces)
            for (begin, end), ring in zip(parts, rings, strict=True)
        ]
    )


@pytest.mark.parametrize(("name", "size"), CASES)
@given(
    numel=st.one_of(st.integers(0, 70), st.integers(71, 3000)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 20),
    bucket=st.booleans(),
)
def test_means_are_exact(
    workers: Workers,
    name: str,
    size: int,
    *,
    numel: int,
    dtype: str,
    seed: int,
    bucket: bool,
) -> None:
    """Within rounding of the mean in double precision, and to the bit the sum in the algorithm's order.

    So they are the same on all workers, and in every run. A bucket sends what its entry says.
    """
    algorithm, options, _ = WAYS[name]
    case = {"numel": numel, "dtype": dtype, "seed": seed, "bucket": bucket}
    told = workers.ask("mean", size, algorithm=algorithm, options=options, **case)
    values = [exact_worker.values_of(rank, seed, numel, dtype) for rank in range(size)]
    if bucket:
        sync = Sync(algorithm=algorithm, options=options)
        sent = wire_bytes(sync, told[0]["payload"], values[0].element_size(), size)
        assert [one["sent_bytes"] for one in told] == [sent] * size
        values = [torch.nn.functional.pad(v, (0, told[0]["payload"] - numel)) for v in values]
    factor = Scaling.over(size).factor
    expected = modelled(name, [value * factor for value in values]) / (size * factor)
    wanted = exact_worker.bits(expected[:numel])
    assert [one["bits"] == wanted for one in told] == [True] * size
    exact = torch.stack([value.double() for value in values]).mean(0)
    magnitude = torch.stack([value.double().abs() for value in values]).mean(0)
    limits = torch.finfo(getattr(torch, dtype))
    gap = (expected.double() - exact).abs()
    assert bool((gap <= size * limits.eps * magnitude + size * limits.smallest_normal).all())


@pytest.mark.parametrize("skips", ["nobody", "last", "all"])
@pytest.mark.parametrize(("name", "size"), [case for case in CASES if case[0] != "ring"])
def test_training_is_that_of_the_all_reduce(
    workers: Workers, name: str, size: int, skips: str
) -> None:
    """To the bit for two workers, else within rounding; whatever parameters which worker uses."""
    algorithm, options, _ = WAYS[name]
    told = workers.ask("trained", size, algorithm=algorithm, options=options, skips=skips)
    plain = workers.ask("trained", size, algorithm="all_reduce", skips=skips)
    assert all(one["parameters"] == told[0]["parameters"] for one in told)
    assert [one["unused"] for one in told] == [skips == "all"] * size
    for ours, theirs in zip(told[0]["parameters"], plain[0]["parameters"], strict=True):
        if size == 2:
            assert ours == theirs
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    payloads = told[0]["payloads"]
    assert told[0]["sent_bytes"] == plain[0]["sent_bytes"]
    frames = step_frames(
        workers=size, num_buckets=len(payloads), sync=Sync(algorithm=algorithm, options=options)
    )
    assert sorted(told[0]["frames"]) == sorted(frame.name for frame in frames)
    assert len(payloads) > 1
    assert all(
        one["least_overhead_ns"] >= 0 for one in told
    )  # what waits in a thread takes none of it


@pytest.mark.parametrize("skips", ["nobody", "last", "all"])
@pytest.mark.parametrize("size", SIZES)
def test_so_is_training_in_parts(workers: Workers, size: int, skips: str) -> None:
    """To the bit for two workers, else within rounding; a worker sends gradients, and then its parameters."""
    told = workers.ask("trained", size, algorithm="sharded", skips=skips)
    plain = workers.ask("trained", size, algorithm="all_reduce", skips=skips)
    assert all(one["parameters"] == told[0]["parameters"] for one in told)
    for ours, theirs in zip(told[0]["parameters"], plain[0]["parameters"], strict=True):
        if size == 2:
            assert ours == theirs
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    if skips == "nobody":  # else buckets were others in the first step
        whole = exact_worker.STEPS * sum(told[0]["payloads"]) * 4
        assert told[0]["sent_bytes"] == whole + whole // size


INSTEAD = "use sync.algorithm='all_reduce', or say options={'local': workers of a host}"
ON_ONE = f"several workers on each of several hosts for HERE, got all 4 on one host; {INSTEAD}"


@pytest.mark.parametrize(
    ("local", "message"),
    [
        (0, ON_ONE),
        (4, ON_ONE),
        (1, ON_ONE.replace("all 4 on one host", "one on each")),
        (3, f"as many workers on each host for HERE, got 3, 1; {INSTEAD}"),
    ],
)
def test_hosts_that_gain_nothing_are_refused(workers: Workers, local: int, message: str) -> None:
    """By name, on all workers, before the first step."""
    told = workers.ask("refused", 4, algorithm="hierarchical", options={"local": local})
    wanted = message.replace("HERE", "sync.algorithm='hierarchical'")
    assert [one["message"] for one in told] == [f"PlanError: wanted {wanted}"] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("numel", [0, 1, 77, 40_001])
@pytest.mark.parametrize("size", SIZES)
def test_shares_come_to_their_places(workers: Workers, size: int, numel: int, dtype: str) -> None:
    """Bit for bit: row r of all-to-all and all-gather is of the worker at position r of the group."""
    told = workers.ask("shares", size, seed=numel, numel=numel, dtype=dtype)
    theirs = [
        exact_worker.values_of(rank, numel, size * numel, dtype).view(size, numel)
        for rank in range(size)
    ]
    whole = exact_worker.bits(torch.stack([rows[r] for r, rows in enumerate(theirs)]))
    for rank, one in enumerate(told):
        rows = torch.stack([rows[rank] for rows in theirs])
        assert one == {
            "all_to_all": exact_worker.bits(rows), "all_gather": whole, "in_place": whole
        }  # fmt: skip
