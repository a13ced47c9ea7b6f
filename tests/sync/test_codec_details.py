"""What single codecs promise: how much rounding loses, which elements are sent, what momentum does."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_workers import Channel, Worker
from test_codec_laws import CODECS, by_codec, gradients
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ridgeline.errors import PlanError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps.body.requirements import check_momentum
from ridgeline.runtime.sync.codecs.bfloat16 import BFloat16
from ridgeline.runtime.sync.codecs.blocks import Float8, Float16, Int8
from ridgeline.runtime.sync.codecs.orthogonal import orthonormalised
from ridgeline.runtime.sync.codecs.powersgd import PowerSGD
from ridgeline.runtime.sync.codecs.topk import TopK, density_after
from ridgeline.synchronisation import COMPRESSIONS, share_elements

ROUNDING: dict[type, tuple[float, float]] = {
    BFloat16: (2.0**-8, 0.0),
    Float16: (2.0**-11, 2.0**-39),
    Float8: (2.0**-4, 2.0**-17),
    Int8: (0.0, 0.501 / 127),
}
"""What may be lost, as a fraction of the element and of the largest of its block."""
BLOCK = 256


@pytest.mark.parametrize("codec", ROUNDING, ids=lambda c: c.__name__)
@given(
    num_elements=st.integers(1, 1500),
    workers=st.integers(1, 4),
    exponent=st.integers(-30, 37),
    spread=st.integers(0, 8),
    seed=st.integers(0, 999),
)
def test_rounding_loses_no_more_than_the_codec_says(
    codec: Any, num_elements: int, workers: int, exponent: int, spread: int, seed: int
) -> None:
    """Of the element itself, or of the largest in its block; zero stays zero, and nothing overflows."""
    made = codec({"block": BLOCK})
    share = share_elements(num_elements, workers, made.block)
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10.0 ** (exponent - spread * torch.rand((workers, share), generator=generator))
    rows = magnitudes.float() * torch.randn((workers, share), generator=generator).clamp(-1, 1)
    rows[:, 0] = 0.0
    found = made.decode(made.encode(rows), share)
    assert found.shape == rows.shape
    of_itself, of_largest = ROUNDING[codec]
    block = share if codec is BFloat16 else min(BLOCK, share)
    largest = rows.view(workers, -1, block).abs().amax(2).repeat_interleave(block, 1)
    lost = (found.double() - rows.double()).abs()
    assert (lost <= of_itself * rows.abs().double() + of_largest * largest.double() + 1e-37).all()
    assert not found[:, 0].any()


def test_half_precision_keeps_what_it_can_hold() -> None:
    """Whole numbers, however large, and gradients far below and above the range of the type."""
    codec = Float16({"block": BLOCK})
    for scale in (2.0**-60, 1.0, 2.0**60):
        rows = torch.arange(-1000.0, 1000.0)[None, :768] * scale
        assert torch.equal(codec.decode(codec.encode(rows), 768), rows)


@by_codec
def test_a_codec_asks_nothing_of_the_host(name: str, options: dict[str, Any]) -> None:
    """Tensors without data go through: no value is read, and no shape depends on one."""
    options = {n: v for n, v in options.items() if n != "warmup_steps"}
    if name == "topk":
        options["momentum"] = 0.9
    channel = Channel(1)
    sync = Sync(compression=name, options=options, bucket_bytes=(2000,))

    def work(rank: int) -> None:
        with FakeTensorMode():
            worker = Worker(channel, rank, sync, [(20, 30), (7,), (5, 4, 3)])
            worker.reduce({n: torch.empty(p.shape) for n, p in worker.named})

    channel.run(work)


class Reference:
    """Deep gradient compression as its authors write it, of one worker and one tensor.

    Source: github.com/synxlin/deep-gradient-compression, dgc/memory.py.
    """

    def __init__(self, size: int, momentum: float) -> None:
        self._m, self._v = torch.zeros(size), torch.zeros(size)
        self._momentum = momentum

    def sent(self, gradient: Tensor, kept: int) -> Tensor:
        self._m = self._momentum * self._m + gradient
        self._v = self._v + self._m
        chosen = torch.topk(self._v.abs(), kept).indices
        out = torch.zeros_like(self._v)
        out[chosen] = self._v[chosen]
        self._m[chosen] = 0.0
        self._v[chosen] = 0.0
        return out


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_is_corrected_as_the_authors_do(momentum: float) -> None:
    """The same elements arrive, of a bucket that is one tensor, and the same momenta remain."""
    channel = Channel(3)
    options = {"density": 0.1, "momentum": momentum}
    sync = Sync(compression="topk", options=options, bucket_bytes=(1 << 20,))

    def work(rank: int) -> None:
        worker = Worker(channel, rank, sync, [(160,)])
        references = [Reference(160, momentum) for _ in range(3)]
        for step in range(40):
            told = worker.reduce(gradients(worker, step))["p0"]
            wanted = torch.zeros(160)
            for other, reference in enumerate(references):
                generator = torch.Generator().manual_seed(1000 * step + other)
                wanted += reference.sent(torch.randn(160, generator=generator), 16)
            torch.testing.assert_close(told, wanted / 3, rtol=1e-4, atol=1e-5)
        if momentum:
            state = worker.transport.state_dict()["momentum.p0"]
            torch.testing.assert_close(state, references[rank]._m, rtol=1e-4, atol=1e-5)

    channel.run(work)


@given(st.integers(1, 300), st.floats(0.001, 1.0), st.integers(0, 99))
def test_exactly_as_many_are_sent_as_the_density_says(
    num_elements: int, density: float, seed: int
) -> None:
    """The largest, ties or not, and what they are."""
    codec = TopK({"density": density, "momentum": 0.0, "warmup_steps": 0})
    kept = min(num_elements, max(1, math.ceil(density * num_elements)))
    rows = torch.randint(-3, 4, (2, num_elements), generator=torch.Generator().manual_seed(seed))
    (coded,) = codec.encode(rows.float())
    assert coded.shape == (2, 2, kept)
    found = codec.decode((coded,), num_elements)
    for row, mine in zip(rows.float(), found, strict=True):
        assert ((mine == row) | (mine == 0)).all()
        assert mine.abs().sum() == row.abs().topk(kept).values.sum()


def test_the_density_falls_in_stages_of_equal_length() -> None:
    """From a quarter to the plan's; at once without a warm-up, and where the plan's is above a quarter."""
    told = [density_after(step, 0.01, steps=9) for step in range(11)]
    assert told == [0.25] * 3 + [0.25**2] * 3 + [0.25**3] * 3 + [0.01] * 2
    assert density_after(0, 0.01, steps=0) == 0.01
    assert density_after(0, 0.3, steps=100) == 0.3


def test_a_warm_up_goes_on_where_it_was_saved() -> None:
    """The steps that are over are part of the state, and a snapshot takes them back."""
    channel = Channel(2)
    options = {"density": 0.01, "warmup_steps": 9}
    sync = Sync(compression="topk", options=options, bucket_bytes=(800,))

    def work(rank: int) -> None:
        worker = Worker(channel, rank, sync, [(20, 30), (200,)])
        sizes = []
        for step in range(11):
            if step == 4:
                saved = {n: t.clone() for n, t in worker.transport.state_dict().items()}
            before = worker.transport.sent_bytes
            worker.reduce(gradients(worker, step))
            sizes.append(worker.transport.sent_bytes - before)
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == 4
        worker.transport.load_state_dict(saved)
        before = worker.transport.sent_bytes
        worker.reduce(gradients(worker, 4))
        assert worker.transport.sent_bytes - before == sizes[4]

    channel.run(work)


@pytest.mark.parametrize("compression", [n for n, one in COMPRESSIONS.items() if one.codec])
def test_a_bucket_without_elements_is_passed_over(compression: str) -> None:
    """As one of a layer without inputs, beside another that is exchanged."""
    sync = Sync(compression=compression, bucket_bytes=(4, 4))
    channel = Channel(2)
    workers = [Worker(channel, rank, sync, [(8, 0), (4,), (0,)]) for rank in range(2)]
    assert [bucket.payload.numel() for bucket in workers[0].buckets].count(0) == 1
    gradients = {"p0": torch.ones(8, 0), "p1": torch.ones(4), "p2": torch.ones(0)}
    for arrived in channel.run(lambda rank: workers[rank].reduce(gradients)):
        assert arrived["p1"].any()


def test_momenta_of_unused_parameters_stay() -> None:
    """Also where a bucket has fewer elements that are not zero than are sent."""
    options = {"density": 0.5, "momentum": 0.9}
    sync = Sync(compression="topk", options=options, bucket_bytes=(1 << 20,))
    channel = Channel(2)
    workers = [Worker(channel, rank, sync, [(16,), (48,)]) for rank in range(2)]
    torch.manual_seed(0)
    gradients = {"p0": torch.randn(16), "p1": torch.randn(48)}
    channel.run(lambda rank: workers[rank].reduce(gradients))
    momenta = workers[0].transport.state_dict()["momentum.p1"]
    before = momenta.clone()
    assert before.any()
    channel.run(lambda rank: workers[rank].reduce({"p0": gradients["p0"]}))
    assert torch.equal(momenta, before)


def test_momentum_that_would_be_added_twice_is_refused() -> None:
    """By the name of the setting; without the option, or on one worker, any optimizer is right."""
    parameters = [nn.Parameter(torch.zeros(3))]
    sync = Sync(compression="topk", options={"momentum": 0.9})
    for optimizer, told in (
        (torch.optim.SGD(parameters, 0.1, momentum=0.5), "SGD with momentum=0.5"),
        (torch.optim.Adam(parameters), "Adam with betas=(0.9, 0.999)"),
    ):
        with pytest.raises(PlanError) as error:
            check_momentum(optimizer, Plan(workers=2, sync=sync))
        assert str(error.value) == (
            f"wanted an optimizer without momentum for compression='topk' with momentum=0.9, got {told} in "
            "group 0: it would be added twice; use SGD with momentum=0, or leave the option out"
        )
        check_momentum(optimizer, Plan(workers=1, sync=sync))
        check_momentum(optimizer, Plan(workers=2, sync=Sync(compression="topk")))
    check_momentum(torch.optim.SGD(parameters, 0.1), Plan(workers=2, sync=sync))


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 5),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_columns_become_orthonormal(rows: int, columns: int, exponent: int, seed: int) -> None:
    """Whatever their size; what only repeats the columns before it is zero, and spans nothing new."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn((2, rows, min(rows, columns)), generator=generator)
    matrix[1, :, -1] = matrix[1, :, 0] * 3.0
    found = orthonormalised(matrix * 10.0**exponent)
    square = found.mT @ found
    identity = torch.eye(square.shape[1])
    torch.testing.assert_close(square[0], identity, rtol=0, atol=1e-5)
    if square.shape[1] > 1:
        identity[-1, -1] = 0.0
    torch.testing.assert_close(square[1], identity, rtol=0, atol=1e-5)


def test_factors_of_another_rank_are_not_taken_up() -> None:
    """A run that continues with another rank keeps what was left out, and its factors start anew."""
    channel = Channel(2)

    def work(rank: int) -> None:
        one, two = (
            Worker(
                channel,
                rank,
                Sync(compression="powersgd", options={"rank": ranks}, bucket_bytes=(1 << 20,)),
                [(30, 20), (9,)],
            )
            for ranks in (1, 3)
        )
        one.reduce(gradients(one, 0))
        new = two.transport.state_dict()["factor.p0"].clone()
        two.transport.load_state_dict(one.transport.state_dict())
        found = two.transport.state_dict()
        assert torch.equal(found["factor.p0"], new)
        assert torch.equal(found["residual.p0"], one.transport.state_dict()["residual.p0"])
        assert found["residual.p0"].any()

    channel.run(work)


def test_a_gradient_of_low_rank_arrives_whole() -> None:
    """Two factors say all of it after a few steps; vectors and small matrices are sent as they are."""
    channel = Channel(2)
    sync = Sync(compression="powersgd", options={"rank": 2}, bucket_bytes=(1 << 20,))

    def work(rank: int) -> None:
        worker = Worker(channel, rank, sync, [(30, 20), (9,), (3, 2)])
        generator = torch.Generator().manual_seed(5)
        left, right = (torch.randn((n, 2), generator=generator) for n in (30, 20))
        mine = {"p0": left @ right.T, "p1": torch.ones(9), "p2": torch.ones(3, 2)}
        told = worker.reduce(mine)
        for name, wanted in mine.items():
            torch.testing.assert_close(told[name], wanted, rtol=1e-4, atol=1e-4)
        assert [n for n in worker.transport.state_dict() if n.startswith("factor.")] == [
            "factor.p0"
        ]

    channel.run(work)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 1, 0)], ids=str)
def test_factors_do_not_depend_on_how_a_gradient_lies(order: tuple[int, ...]) -> None:
    """What has arrived and what is left add up to what was sent, each element in its place."""
    channel = Channel(2)
    sync = Sync(compression="powersgd", options={"rank": 2}, bucket_bytes=(1 << 20,))
    sizes = (8, 6, 3, 2)
    inverse = tuple(sorted(range(4), key=order.__getitem__))

    def work(rank: int) -> None:
        worker = Worker(channel, rank, sync, [sizes])
        laid = torch.zeros([sizes[d] for d in order]).permute(inverse)
        worker.named[0][1].data = laid
        worker.cut([0], sync.bucket_bytes)
        gradient = torch.randn(sizes, generator=torch.Generator().manual_seed(5))
        gradient = torch.empty_like(laid).copy_(gradient)
        total = torch.zeros(sizes)
        for step in range(1, 4):
            total += worker.reduce({"p0": gradient})["p0"]
            left = worker.residuals()["p0"]
            torch.testing.assert_close(total + left, gradient * step, rtol=1e-4, atol=1e-4)
        assert worker.buckets[0].views[0].stride() == laid.stride()

    channel.run(work)


class LeavingTheMean(PowerSGD):
    """The rule of torch's hook: what is left is the own gradient less what all have made of theirs."""

    def share(self, values: Tensor, mean: Tensor, *arguments: Any) -> None:
        wanted = values.clone()
        super().share(values, mean, *arguments)
        torch.sub(wanted, mean, out=values)


def left_after(channel: Channel, sync: Sync, steps: tuple[int, ...], codec: str = "") -> list[Any]:
    """How large a worker's residual is after some steps of noise."""

    def work(rank: int) -> list[float]:
        worker = Worker(channel, rank, sync, [(16, 12), (24,)], codec=codec)
        generator = torch.Generator().manual_seed(rank)
        found = []
        for step in range(1, steps[-1] + 1):
            noise = torch.randn(216, generator=generator)
            worker.reduce({"p0": noise[:192].view(16, 12), "p1": noise[192:]})
            if step in steps:
                found.append(float(worker.residuals()["p0"].norm()))
        return found

    return channel.run(work)[0]


@pytest.mark.parametrize(("name", "options"), dict(CODECS).items(), ids=str)
def test_what_is_left_of_noise_stays_bounded(name: str, options: dict[str, Any]) -> None:
    """After 6400 steps it is no larger than after 400, up to a third."""
    sync = Sync(compression=name, options=options, bucket_bytes=(1 << 20,))
    early, late = left_after(Channel(2), sync, (400, 6400))
    assert late < 4 / 3 * early


def test_leaving_the_mean_walks_at_random() -> None:
    """The rule that the bound above is to catch: four times the steps, twice what is left."""
    sync = Sync(compression="powersgd", options={"rank": 1}, bucket_bytes=(1 << 20,))
    codec = f"{__name__}:{LeavingTheMean.__name__}"
    early, middle, late = left_after(Channel(2), sync, (400, 1600, 6400), codec)
    assert 1.5 < middle / early < 2.7
    assert 1.5 < late / middle < 2.7


@pytest.mark.parametrize(("shape", "grows"), [((12, 16), False), ((16, 12), True)], ids=str)
def test_what_workers_differ_by_is_sent_as_far_as_columns_of_means_reach(
    shape: tuple[int, int], grows: bool
) -> None:
    """Of gradients that always differ alike the rest stays where it is, and adds up to nothing."""
    sync = Sync(compression="powersgd", options={"rank": 1}, bucket_bytes=(1 << 20,))
    channel, steps = Channel(2), (100, 800)
    common, apart = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))

    def work(rank: int) -> list[Tensor]:
        worker = Worker(channel, rank, sync, [shape])
        found = []
        for step in range(1, steps[-1] + 1):
            worker.reduce({"p0": common + (1 - 2 * rank) * apart})
            if step in steps:
                found.append(worker.residuals()["p0"].clone())
        return found

    (early, late), (_, other) = channel.run(work)
    growth = float(late.norm() / early.norm())
    assert growth > 6 if grows else growth < 4 / 3
    assert float((late + other).norm()) < 50 * float(common.norm())
