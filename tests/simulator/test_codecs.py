"""What encoding costs a step on a CPU: measured where it can be, in the thread beside the backward pass."""

import msgspec
import pytest

from ridgeline.machine import Machine, Setting, SizePoint
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.curves.what_if import what_if
from ridgeline.simulator.exchange.codecs import CodecPrices
from ridgeline.simulator.exchange.synchronising import Beside, BucketPrices, hidden_behind
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import codec_bytes
from strategies import make_codec_timing, make_collective, make_machine, make_workload, measured

MS = 1_000_000
TWO = Setting(device="cpu", workers=2, threads=1)
SQUARE = (512, 512)
LOW_RANK = Sync(compression="powersgd", bucket_bytes=(1 << 30,))


def _machine(*, slowdown: float = 2.0, latency_s: float = 1e-3) -> Machine:
    """Two workers whose codec was timed."""
    timing = make_codec_timing(TWO, slowdown=slowdown)
    return msgspec.structs.replace(make_machine(latency_s=latency_s), codecs=(timing,))


def test_a_bucket_costs_what_was_measured_of_its_bytes_parameters_and_shapes() -> None:
    """Vectors are parameters, and no shapes of matrices."""
    prices = CodecPrices(_machine(), LOW_RANK, TWO)
    assert prices.notes == ()
    assert prices.seconds(1 << 20, [SQUARE]) == pytest.approx(1e-3)
    assert prices.seconds(1 << 20, [SQUARE] * 3) == pytest.approx(1e-3 + 20e-6)
    assert prices.seconds(1 << 20, [SQUARE, (64,), (64,)]) == pytest.approx(1e-3 + 20e-6)
    assert prices.seconds(1 << 20, [SQUARE, (64, 64, 3, 3)]) == pytest.approx(2e-3 + 10e-6)
    assert prices.seconds(1 << 22, [SQUARE]) == pytest.approx(4e-3)
    assert prices.seconds(0) == CodecPrices(_machine(), Sync(), TWO).seconds(1 << 20) == 0.0


def test_faster_memory_encodes_faster() -> None:
    """As the bytes that a codec moves are no others than those of operators."""
    faster = CodecPrices(what_if(_machine(), {"memory": 2.0}), LOW_RANK, TWO)
    assert faster.seconds(1 << 20) == pytest.approx(0.5e-3)


def test_what_is_assumed_of_a_codec_is_said() -> None:
    """Another number of workers scales by the bytes moved, other options not at all, and without a timing."""
    four = Setting(device="cpu", workers=4, threads=1)
    timing = _machine().codecs[0]
    sign = msgspec.structs.replace(
        _machine(), codecs=(msgspec.structs.replace(timing, compression="sign"),)
    )
    sync = Sync(compression="sign")
    prices = CodecPrices(sign, sync, four)
    growth = sum(codec_bytes(sync, 1 << 20, 4)) / sum(codec_bytes(sync, 1 << 20, 2))
    assert growth > 1.2
    assert prices.seconds(1 << 20) == pytest.approx(growth * 1e-3)
    assert prices.notes == (
        "encoding sign gradients at 4 x 1 cpu threads was not measured: assumed as at 2 x 1 cpu threads",
    )
    ranked = Sync(compression="powersgd", options={"rank": 2})
    assert CodecPrices(_machine(), ranked, TWO).notes == (
        "encoding PowerSGD gradients was measured with default options: assumed to take as long with rank=2",
    )
    unknown = CodecPrices(make_machine(), LOW_RANK, TWO)
    assert unknown.seconds(1 << 20) == pytest.approx(sum(codec_bytes(LOW_RANK, 1 << 20, 2)) / 1e9)
    assert unknown.notes == (
        "encoding PowerSGD gradients was not measured: assumed to take what the bytes that it moves do",
    )


def test_a_bucket_is_encoded_sent_and_decoded_on_its_lane() -> None:
    """One bucket, which leaves at the end: its frame has all of it, and the optimizer nothing."""
    workload = make_workload(backward=[MS], gradient_bytes=[1 << 20])
    plan = Plan(workers=2, threads=1, sync=LOW_RANK)
    encoded, plain = (
        {s.name: s for s in simulate(machine, workload, plan).frames}
        for machine in (_machine(), _machine(latency_s=11e-3))
    )
    lasts = encoded["all_reduce/0"].duration_ns * 1e-9
    sent_s = BucketPrices(_machine(), LOW_RANK, TWO).cost(1 << 20, 4, [(1 << 18,)]).seconds
    assert lasts == pytest.approx(sent_s + 1e-3 + 1e-3, rel=1e-3)
    # Two collectives, and one of flags, each with the latency of the link.
    assert plain["all_reduce/0"].duration_ns * 1e-9 == pytest.approx(lasts + 30e-3, rel=0.01)
    assert encoded["optimizer"].duration_ns == plain["optimizer"].duration_ns


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_encoding_beside_backward_takes_from_it(slowdown: float) -> None:
    """On cores that are shared the step takes what both take; on free ones encoding hides."""
    sync = Sync(compression="powersgd", bucket_bytes=(1 << 24, 4))
    workload = make_workload(backward=[MS, 100 * MS], gradient_bytes=[1 << 24, 4])
    plan = Plan(workers=2, threads=1, sync=sync)
    quick = _machine(slowdown=slowdown, latency_s=0.0)
    quick = msgspec.structs.replace(
        quick,
        collectives=tuple(
            make_collective(TWO, 0.0, 1e15, name) for name in ("all_reduce", "broadcast")
        ),
    )
    prices = CodecPrices(quick, sync, TWO)
    whole_s = prices.seconds(1 << 24, [(1 << 22,)])
    instant = msgspec.structs.replace(quick.codecs[0], table=(quick.codecs[0].table[0],))
    instant = msgspec.structs.replace(
        instant, table=(SizePoint(num_bytes=1 << 30, seconds=measured(1e-12, "s")),)
    )
    without = msgspec.structs.replace(quick, codecs=(instant,))
    step_s, least_s = (
        simulate(machine, workload, plan).step_ns * 1e-9 for machine in (quick, without)
    )
    tail_s = prices.seconds(4, [(1,)])
    longer_s = step_s - least_s - tail_s
    assert longer_s == pytest.approx(whole_s if slowdown == 2.0 else 0.0, abs=1e-5)


def test_what_travels_beside_steps_makes_them_longer() -> None:
    """Hidden until the steps are over, and no less slow for that: rates hold while both go on."""
    slowdown = {"compute": 1.25, "communication": 2.0}
    assert hidden_behind(1.0, 10.0, {}) == (1.0, 0.0)
    assert hidden_behind(10.0, 1.0, {}) == (1.0, 0.0)
    # It is over after 2 s, in which steps of 2 s get as far as 1.6 s do.
    assert hidden_behind(1.0, 10.0, slowdown) == Beside(1.0, pytest.approx(0.4))
    # Steps of 1 s take 1.25 s beside it, in which 0.625 s of it travel.
    assert hidden_behind(10.0, 1.0, slowdown) == Beside(0.625, pytest.approx(0.25))


def test_a_late_exchange_pays_for_the_steps_that_it_slows() -> None:
    """The step is longer by its share of that, and says so."""
    sync = Sync(every=10, options={"delay": 5})
    workload = make_workload(backward=[100 * MS], gradient_bytes=[1 << 20])
    plan = Plan(workers=2, threads=1, sync=sync)
    free, slow = (
        simulate(make_machine(slowdown=(rate, 1.0)), workload, plan) for rate in (1.0, 2.0)
    )
    travelling_s = 1e-3 + (1 << 20) / 1e9
    assert (slow.step_ns - free.step_ns) * 1e-9 == pytest.approx(travelling_s / 2 / 10, rel=0.01)
    assert any("which take 1.02 ms longer beside it" in note for note in slow.notes), slow.notes
