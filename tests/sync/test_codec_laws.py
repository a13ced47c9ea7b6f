"""Every codec keeps the laws that training relies on, for random sizes, buckets and numbers of workers."""

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_workers import Channel, Worker
from torch import Tensor

from ridgeline.plan import Plan, Sync
from ridgeline.simulator.exchange.synchronising import sent_bytes
from ridgeline.synchronisation import COMPRESSIONS
from ridgeline.workload import Parameter
from strategies import make_workload

CODECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {}),
    ("fp16", {"block": 256}),
    ("fp8", {"block": 256}),
    ("int8", {"block": 256}),
    ("topk", {"density": 0.125}),
    ("topk", {"density": 0.125, "warmup_steps": 3}),
    ("powersgd", {"rank": 1}),
    ("powersgd", {"rank": 3}),
    ("sign", {"block": 32}),
    ("sign", {}),
)
by_codec = pytest.mark.parametrize(("name", "options"), CODECS, ids=str)
shapes = st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple)
models = st.lists(shapes, min_size=1, max_size=5)
caps = st.lists(st.sampled_from((1, 100, 1000, 5000)), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float64))
several = st.integers(2, 4)


def gradients(worker: Worker, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Normal ones, which differ from worker to worker."""
    generator = torch.Generator().manual_seed(1000 * seed + worker.transport.rank)
    return {
        name: (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)
        for name, p in worker.named
    }


def predicted_bytes(worker: Worker) -> int:
    """Bytes of a step, by what is known of the parameters."""
    parameters = tuple(
        Parameter(
            name=name,
            shape=tuple(p.shape),
            dtype=str(p.dtype).removeprefix("torch."),
            num_bytes=p.numel() * p.element_size(),
            is_trainable=True,
            ready_op=4,
        )
        for name, p in worker.named
    )
    workload = msgspec.structs.replace(
        make_workload(), parameters=parameters, ready_order=tuple(p.name for p in parameters)
    )
    return sum(sent_bytes(workload, Plan(workers=worker.transport.size, sync=worker.sync)))


@by_codec
@settings(max_examples=25)
@given(model=models, cap=caps, workers=several, dtype=dtypes, seed=st.integers(0, 99))
def test_what_arrived_and_what_is_left_are_the_sum_of_all_gradients(
    name: str, options: dict[str, Any], model: Any, cap: Any, workers: int, dtype: Any, seed: int
) -> None:
    """In float64, within float32's rounding, over steps with new buckets between; all hold the same bits."""
    channel = Channel(workers)
    sync = Sync(compression=name, options=options, bucket_bytes=cap)

    def work(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        worker = Worker(channel, rank, sync, model, dtype)
        given_ = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in worker.named}
        arrived = {n: torch.zeros_like(t) for n, t in given_.items()}
        for step in range(8):
            if step == 4:
                worker.cut(range(len(model) - 1, -1, -1), (400,))
            mine = gradients(worker, seed + step)
            for n, told in worker.reduce(mine).items():
                given_[n] += mine[n].float()
                arrived[n] += told
        return given_, arrived, {n: r.double() for n, r in worker.residuals().items()}

    found = channel.run(work)
    for n, arrived in found[0][1].items():
        assert all(torch.equal(arrived, others[1][n]) for others in found)
        total = sum(worker[0][n] for worker in found)
        left = sum(worker[2][n] for worker in found)
        gap = (arrived * workers + left - total).abs().max()
        assert gap < 64 * workers * torch.finfo(torch.float32).eps * (8 + float(total.abs().max()))


@by_codec
@settings(max_examples=25)
@given(model=models, cap=caps, workers=several, dtype=dtypes)
def test_bytes_predicted_are_bytes_counted(
    name: str, options: dict[str, Any], model: Any, cap: Any, workers: int, dtype: Any
) -> None:
    """To the byte, with what aligns gradients in buckets."""
    channel = Channel(workers)
    options = {n: v for n, v in options.items() if n != "warmup_steps"}
    sync = Sync(compression=name, options=options, bucket_bytes=cap)

    def work(rank: int) -> tuple[int, int]:
        worker = Worker(channel, rank, sync, model, dtype)
        worker.reduce(gradients(worker, 1))
        return worker.transport.sent_bytes, predicted_bytes(worker)

    for counted, predicted in channel.run(work):
        assert counted == predicted


@by_codec
@settings(max_examples=10)
@given(model=models, cap=caps, workers=several)
def test_every_element_arrives(
    name: str, options: dict[str, Any], model: Any, cap: Any, workers: int
) -> None:
    """Of gradients that never change, nearly all of every element's mean is there after some steps."""
    channel = Channel(workers)
    sync = Sync(compression=name, options=options, bucket_bytes=cap)
    steps = 60

    def work(rank: int) -> dict[str, Tensor]:
        worker = Worker(channel, rank, sync, model)
        mine = {n: torch.full(p.shape, rank + 1.0) for n, p in worker.named}
        arrived = {n: torch.zeros(p.shape) for n, p in worker.named}
        for _ in range(steps):
            for n, told in worker.reduce(mine).items():
                arrived[n] += told
        return arrived

    mean = steps * (workers + 1) / 2
    for arrived in channel.run(work):
        for total in arrived.values():
            assert 0.75 * mean < float(total.min()) <= float(total.max()) < 1.25 * mean


@by_codec
def test_what_is_sent_has_the_same_shape_whatever_the_gradients(
    name: str, options: dict[str, Any]
) -> None:
    """Zeros, numbers, and what is none: nothing depends on a value."""
    options = {n: v for n, v in options.items() if n != "warmup_steps"}
    channel = Channel(2)
    sync = Sync(compression=name, options=options, bucket_bytes=(2000,))

    def work(rank: int) -> None:
        worker = Worker(channel, rank, sync, [(20, 30), (7,), (5, 4, 3)])
        for value in (0.0, 1.0, math.nan, math.inf):
            worker.reduce({n: torch.full(p.shape, value) for n, p in worker.named})

    channel.run(work)
    rounds = len(channel.shapes) // 4
    assert channel.shapes == channel.shapes[:rounds] * 4


@by_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_arrives_and_does_not_stay(
    name: str, options: dict[str, Any], value: float
) -> None:
    """One element of one worker; later steps are finite, and follow their gradients again."""
    channel = Channel(2)
    sync = Sync(compression=name, options=options, bucket_bytes=(2000,))

    def work(rank: int) -> None:
        worker = Worker(channel, rank, sync, [(20, 30), (7,)])
        worker.reduce(gradients(worker, 1))
        spoilt = gradients(worker, 2)
        if rank:
            spoilt["p0"][3, 4] = value
        told = worker.reduce(spoilt)
        assert not told["p0"][3, 4].isfinite()
        assert all(t.isfinite().all() for t in worker.transport.state_dict().values())
        total = torch.zeros(20, 30)
        for _ in range(60):
            total += worker.reduce({n: torch.ones(p.shape) for n, p in worker.named})["p0"]
        assert total.isfinite().all()
        assert float(total.min()) > 30.0

    channel.run(work)


@by_codec
def test_what_is_remembered_is_put_back(name: str, options: dict[str, Any]) -> None:
    """Another worker with the state of this one, in other memory, goes on with the same bits."""
    channel = Channel(2)
    sync = Sync(compression=name, options=options, bucket_bytes=(900, 2000))

    def work(rank: int) -> None:
        first = Worker(channel, rank, sync, [(20, 30), (7,), (9, 9)])
        for seed in range(4):
            first.reduce(gradients(first, seed))
        saved = {n: t.clone() for n, t in first.transport.state_dict().items()}
        second = Worker(channel, rank, sync, [(20, 30), (7,), (9, 9)])
        second.reduce(gradients(second, 50))
        second.transport.load_state_dict(saved)
        for seed in range(10, 14):
            one, other = (w.reduce(gradients(w, seed)) for w in (first, second))
            assert all(torch.equal(one[n], other[n]) for n in one)
        second.transport.load_state_dict({})
        third = Worker(channel, rank, sync, [(20, 30), (7,), (9, 9)])
        one, other = (w.reduce(gradients(w, 20)) for w in (second, third))
        assert all(torch.equal(one[n], other[n]) for n in one)

    channel.run(work)


@by_codec
@settings(max_examples=10)
@given(seed=st.integers(0, 999), workers=several)
def test_what_some_or_all_workers_do_not_use_loses_nothing(
    name: str, options: dict[str, Any], seed: int, workers: int
) -> None:
    """Where nobody has a gradient nothing arrives and all stays; where some have one the sum holds."""
    channel = Channel(workers)
    sync = Sync(compression=name, options=options, bucket_bytes=(4000,))
    uses = torch.rand(12, workers, generator=torch.Generator().manual_seed(seed)) < 0.4

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        worker = Worker(channel, rank, sync, [(5, 7), (12, 9), (3,)])
        total, arrived = (torch.zeros(12, 9, dtype=torch.float64) for _ in range(2))
        for step, used in enumerate(uses):
            mine = gradients(worker, step)
            before = worker.residuals()["p1"].clone()
            if used[rank]:
                total += mine["p1"]
            else:
                del mine["p1"]
            told = worker.reduce(mine, () if used.any() else ("p1",))["p1"]
            if not used.any():
                assert torch.equal(before, worker.residuals()["p1"])
            arrived += told
        return total, arrived, worker.residuals()["p1"].double()

    found = channel.run(work)
    gap = found[0][1] * workers + sum(w[2] for w in found) - sum(w[0] for w in found)
    assert float(gap.abs().max()) < 1e-4


@by_codec
def test_what_one_worker_alone_uses_arrives(name: str, options: dict[str, Any]) -> None:
    """In full over the steps: whoever rounds the mean makes up for it, though it has no gradient itself."""
    channel = Channel(3)
    sync = Sync(compression=name, options=options, bucket_bytes=(4000,))
    shapes, steps = [(5, 7), (12, 9), (3,)], 60

    def work(rank: int) -> tuple[Tensor, Tensor, float]:
        worker = Worker(channel, rank, sync, shapes)
        mine = gradients(worker, 7)
        gradient = mine["p1"] if rank == 0 else mine.pop("p1")
        arrived, most = torch.zeros(12, 9), 0.0
        for step in range(steps):
            arrived += worker.reduce(mine)["p1"]
            if step == steps // 2:
                most = float(worker.residuals()["p1"].abs().max())
        return gradient, arrived, float(worker.residuals()["p1"].abs().max()) - most

    found = channel.run(work)
    # Left out are some steps' worth at most, and no more of them from step to step.
    (gradient, arrived, _), *_ = found
    others = [growth for _, _, growth in found[1:]]
    assert max(others) < 0.5
    assert float((arrived * 3 / steps - gradient).abs().max()) < float(gradient.abs().max())


def test_every_lossy_compression_is_held_to_these_laws() -> None:
    """A new entry joins the list above."""
    assert {name for name, _ in CODECS} == {n for n, e in COMPRESSIONS.items() if not e.is_exact}
