"""The laws: worked numbers, limits, and what they refuse."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import laws
from ridgeline.errors import LawError, RidgelineError

fractions = st.floats(0.0, 1.0)
counts = st.integers(1, 1024)
positive = st.floats(1e-6, 1e6)


def test_amdahl_gives_the_worked_numbers() -> None:
    """9 s of computing and 1 s of communication: 3 x gives 2.5, 9 x gives 5, and the limit is 10."""
    assert laws.amdahl(0.9, 3.0) == pytest.approx(2.5)
    assert laws.amdahl(0.9, 9.0) == pytest.approx(5.0)
    assert laws.amdahl_limit(0.9) == pytest.approx(10.0)
    assert laws.amdahl_limit(0.99) == pytest.approx(100.0)
    assert laws.amdahl_limit(1.0) == math.inf


def test_amdahl_is_the_ratio_of_the_times_it_was_derived_from() -> None:
    """With p = I beta / (pi + I beta) it equals t1 / t2 of one-after-the-other execution."""
    intensity, beta, pi, speedup, volume = 30.0, 2.0, 10.0, 3.0, 1e6
    t1 = volume * (1 + intensity * beta / pi) / (intensity * beta)
    t2 = volume * (1 + intensity * beta / (speedup * pi)) / (intensity * beta)
    p = intensity * beta / (pi + intensity * beta)
    assert laws.amdahl(p, speedup) == pytest.approx(t1 / t2)


@given(fractions, st.floats(1.0, 1e6))
def test_amdahl_never_exceeds_speedup_or_limit(fraction: float, speedup: float) -> None:
    """No gain is above that of the part, nor above 1 / (1 - p)."""
    gain = laws.amdahl(fraction, speedup)
    assert 1.0 - 1e-9 <= gain <= speedup * (1 + 1e-9)
    assert gain <= laws.amdahl_limit(fraction) * (1 + 1e-9)


@given(st.floats(0.01, 0.99), st.integers(2, 64))
def test_karp_flatt_recovers_the_serial_fraction(fraction: float, workers: int) -> None:
    """Karp and Flatt invert Amdahl's law."""
    assert laws.karp_flatt(laws.amdahl(fraction, workers), workers) == pytest.approx(1 - fraction)


@given(fractions, counts)
def test_gustafson_is_linear_between_one_and_all(serial: float, workers: int) -> None:
    """A serial share of 0 gives N, of 1 gives 1."""
    assert laws.gustafson(0.0, workers) == workers
    assert laws.gustafson(1.0, workers) == 1.0
    assert 1.0 <= laws.gustafson(serial, workers) <= workers


def test_roofline_meets_at_the_ridge_point() -> None:
    """Below the ridge the bandwidth sets the speed, above it the peak, at it both."""
    peak, bandwidth = 100e9, 20e9
    ridge = laws.ridge_point(peak, bandwidth)
    assert laws.roofline(ridge, peak, bandwidth) == peak
    assert laws.roofline(ridge / 2, peak, bandwidth) == peak / 2
    assert laws.roofline(ridge * 2, peak, bandwidth) == peak


@given(positive, positive, positive, positive)
def test_roofline_seconds_are_flops_over_attainable(
    flops: float, num_bytes: float, peak: float, bandwidth: float
) -> None:
    """Time and speed are two views of one roofline."""
    seconds = laws.roofline_seconds(flops, num_bytes, peak, bandwidth)
    assert flops / laws.roofline(flops / num_bytes, peak, bandwidth) == pytest.approx(seconds)


def test_usl_peaks_where_the_formula_says() -> None:
    """X(N) is largest at sqrt((1 - sigma) / kappa); without coherence cost it never falls."""
    peak = laws.usl_peak(0.1, 0.01)
    assert peak == pytest.approx(math.sqrt(0.9 / 0.01))
    best = laws.usl(peak, sigma=0.1, kappa=0.01)
    for other in (peak * 0.9, peak * 1.1):
        assert laws.usl(other, sigma=0.1, kappa=0.01) < best
    assert laws.usl_peak(0.5, 0.0) == math.inf
    assert laws.usl_peak(1.0, 0.1) == 1.0  # never less than one worker


@given(st.floats(0.0, 0.5), st.floats(0.1, 1e6))
def test_fit_amdahl_recovers_its_own_points(serial: float, rate: float) -> None:
    """Points of the law give back the law."""
    workers = [1, 2, 4, 8]
    fit = laws.fit_amdahl(workers, [rate * laws.amdahl(1 - serial, n) for n in workers])
    assert fit.serial_fraction == pytest.approx(serial, abs=1e-6)
    assert fit.rate == pytest.approx(rate, rel=1e-6)
    assert fit.max_error < 1e-6


@given(st.floats(0.0, 0.3), st.floats(1e-4, 0.05), st.floats(0.1, 1e6))
def test_fit_usl_recovers_its_own_points(sigma: float, kappa: float, rate: float) -> None:
    """Seven exact points identify rate, contention and coherence."""
    workers = [1, 2, 4, 8, 12, 16, 24]
    fit = laws.fit_usl(workers, [laws.usl(n, sigma=sigma, kappa=kappa, rate=rate) for n in workers])
    assert fit.sigma == pytest.approx(sigma, abs=1e-5)
    assert fit.kappa == pytest.approx(kappa, rel=1e-3)
    assert fit.rate == pytest.approx(rate, rel=1e-4)
    assert fit.is_kappa_identifiable
    assert fit.note == ""


def test_fit_usl_says_when_kappa_is_not_identifiable() -> None:
    """With three or four points kappa means nothing, and the fit says so."""
    fit = laws.fit_usl([1, 2, 4], [1.0, 1.9, 3.5])
    assert not fit.is_kappa_identifiable
    assert fit.note == (
        "kappa is not identifiable: 3 different numbers of workers, wanted at least 5"
    )


def test_fit_usl_says_when_noise_hides_kappa() -> None:
    """Enough points that scatter around Amdahl's law do not identify kappa either."""
    workers = [1, 2, 4, 8, 16, 32]
    noise = [1.05, 0.95, 1.05, 0.95, 1.05, 0.95]
    points = [laws.amdahl(0.9, n) * e for n, e in zip(workers, noise, strict=True)]
    fit = laws.fit_usl(workers, points)
    assert not fit.is_kappa_identifiable
    assert fit.note.startswith("kappa is not identifiable: ")
    assert fit.note.endswith("of zero")


def test_pipelining_removes_amdahls_limit() -> None:
    """Pipelined, 9 s of computing and 1 s of communication reach 10 x with units 9 x as fast."""
    assert laws.pipelined_speedup(9.0, 1.0, 3.0) == pytest.approx(10.0 / 3.0)
    assert laws.pipelined_speedup(9.0, 1.0, 9.0) == pytest.approx(10.0)
    assert laws.pipelined_speedup(9.0, 1.0, 90.0) == pytest.approx(10.0)
    assert laws.pipelined_speedup(9.0, 1.0, 3.0, pieces=1) == pytest.approx(laws.amdahl(0.9, 3.0))


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.integers(1, 100))
def test_pipelined_time_lies_between_overlap_and_sequence(
    compute: float, communication: float, pieces: int
) -> None:
    """More pieces help, never beyond the longer of the two."""
    seconds = laws.pipelined_seconds(compute, communication, pieces=pieces)
    assert max(compute, communication) <= seconds <= (compute + communication) * (1 + 1e-12)
    assert laws.pipelined_seconds(compute, communication) == max(compute, communication)


def test_pipelined_fraction_is_one_from_the_ridge_on() -> None:
    """Below the ridge the hidden share is beta I / pi and Amdahl's limit pi / (pi - beta I)."""
    assert laws.pipelined_parallel_fraction(5.0, 100e9, 20e9) == 1.0
    share = laws.pipelined_parallel_fraction(2.5, 100e9, 20e9)
    assert share == 0.5
    assert laws.amdahl_limit(share) == 2.0


def test_pipeline_of_stages() -> None:
    """1F1B: (m + p - 1)(f + b) seconds, (p - 1) / (m + p - 1) of them idle."""
    assert laws.pipeline_seconds(4, 8, 1.0, 2.0) == 11 * 3.0
    assert laws.pipeline_bubble(4, 8) == pytest.approx(3 / 11)
    assert laws.pipeline_bubble(1, 8) == 0.0


def test_prefetching_hides_the_shorter_side() -> None:
    """The step is max(load / loaders, step), and their sum when nothing is prepared ahead."""
    assert laws.prefetched_step_seconds(0.4, 0.1, loaders=2) == 0.2
    assert laws.prefetched_step_seconds(0.1, 0.4) == 0.4
    assert laws.prefetched_step_seconds(0.1, 0.4, depth=0) == 0.5


@given(
    loaders=st.integers(1, 5),
    depth=st.integers(1, 6),
    load_s=st.floats(0.1, 10.0),
    step_s=st.floats(0.1, 10.0),
)
def test_loaders_beyond_the_depth_wait(
    loaders: int, depth: int, load_s: float, step_s: float
) -> None:
    """As steps that take batches in turn, of which no more than `depth` are prepared or under way."""
    free, taken, now = [0.0] * loaders, [], 0.0
    for batch in range(400):
        loader = min(range(loaders), key=free.__getitem__)
        begin = max(free[loader], taken[batch - depth] if batch >= depth else 0.0)
        free[loader] = begin + load_s
        taken.append(max(now, free[loader]))
        now = taken[-1] + step_s
    period_s = (taken[-1] - taken[199]) / 200
    wanted_s = laws.prefetched_step_seconds(load_s, step_s, loaders=loaders, depth=depth)
    assert period_s == pytest.approx(wanted_s, rel=0.05)


def test_ring_all_reduce() -> None:
    """2 (n-1)/n S / B + alpha; a worker alone pays nothing."""
    assert laws.ring_all_reduce_seconds(8e6, 4, 1e9, latency_s=1e-3) == pytest.approx(0.013)
    assert laws.ring_all_reduce_seconds(8e6, 1, 1e9, latency_s=1e-3) == 0.0
    assert laws.ring_all_reduce_seconds(0, 4, 1e9, hop_s=1e-3) == pytest.approx(6e-3)


@given(st.floats(0, 1e9), st.integers(1, 64), st.floats(1e6, 1e12), st.floats(0, 1e-3))
def test_all_reduce_is_reduce_scatter_and_all_gather(
    num_bytes: float, workers: int, bandwidth: float, hop: float
) -> None:
    """A ring all-reduce costs what its two halves cost."""
    halves = laws.reduce_scatter_seconds(
        num_bytes, workers, bandwidth, hop_s=hop
    ) + laws.all_gather_seconds(num_bytes, workers, bandwidth, hop_s=hop)
    whole = laws.ring_all_reduce_seconds(num_bytes, workers, bandwidth, hop_s=hop)
    assert whole == pytest.approx(halves)


def test_tree_beats_ring_on_latency_only() -> None:
    """Many workers and few bytes favour the tree; many bytes favour the ring."""
    small = {"workers": 64, "bandwidth_bytes_per_s": 1e9, "hop_s": 1e-5}
    assert laws.tree_all_reduce_seconds(1e3, **small) < laws.ring_all_reduce_seconds(1e3, **small)
    assert laws.tree_all_reduce_seconds(1e9, **small) > laws.ring_all_reduce_seconds(1e9, **small)
    assert laws.tree_all_reduce_seconds(1e9, 1, 1e9, latency_s=1.0) == 0.0


@given(st.floats(0, 1e9), st.integers(1, 64), st.floats(1e6, 1e12))
def test_colocated_servers_equal_the_ring(num_bytes: float, workers: int, bandwidth: float) -> None:
    """A synchronous parameter server beside every worker never beats the ring; it equals it."""
    server = laws.parameter_server_seconds(
        num_bytes, workers, bandwidth, servers=workers, colocated=True
    )
    assert server == pytest.approx(laws.ring_all_reduce_seconds(num_bytes, workers, bandwidth))


def test_parameter_server_is_limited_by_its_servers() -> None:
    """max(M / B, n M / (k B)): few servers are the bottleneck, many leave the worker's own link."""
    assert laws.parameter_server_seconds(1e9, 8, 1e9, servers=2) == 4.0
    assert laws.parameter_server_seconds(1e9, 8, 1e9, servers=16) == 1.0
    assert laws.parameter_server_seconds(1e9, 8, 1e9, servers=8, latency_s=0.5) == 2.0


@pytest.mark.parametrize(
    ("operation", "factor"),
    [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75), ("broadcast", 1.0)],
)
def test_bus_bandwidth_factors(operation: str, factor: float) -> None:
    """The factors of nccl-tests for four workers; a worker alone moves nothing."""
    assert laws.bus_bandwidth_factor(operation, 4) == factor
    assert laws.bus_bandwidth_factor(operation, 1) == 0.0


@given(st.text() | st.sampled_from(("allreduce", "all_reduce_", "ALL_REDUCE")), counts)
def test_unknown_collectives_have_no_factor(operation: str, workers: int) -> None:
    """A misspelt operation is refused, whatever the number of workers."""
    with pytest.raises(LawError) as error:
        laws.bus_bandwidth_factor(operation, workers)
    assert str(error.value) == (
        "wanted an operation out of all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, reduce, "
        f"got {operation!r}; name one of them"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: laws.amdahl(1.5, 2.0),
            "wanted a finite parallel_fraction >= 0 and <= 1, got 1.5; give a number in that range",
        ),
        (
            lambda: laws.amdahl(0.5, 0.0),
            "wanted a speedup > 0, got 0; give a number in that range",
        ),
        (
            lambda: laws.ridge_point(1e9, 0.0),
            "wanted a finite bandwidth_bytes_per_s > 0, got 0; give a number in that range",
        ),
        (
            lambda: laws.usl(0.5, sigma=0.0, kappa=0.0),
            "wanted a finite workers >= 1, got 0.5; give a number in that range",
        ),
        (
            lambda: laws.roofline(float("nan"), 1.0, 1.0),
            "wanted a finite intensity >= 0, got nan; give a number in that range",
        ),
        (
            lambda: laws.parameter_server_seconds(1.0, 2, 1.0, servers=3, colocated=True),
            "wanted a finite servers >= 1 and <= 2, got 3; give a number in that range",
        ),
        (
            lambda: laws.fit_amdahl([1, 2], [1.0]),
            "wanted one value per number of workers, got 1 values for 2; give two sequences of one length",
        ),
        (
            lambda: laws.fit_amdahl([2, 2], [1.0, 1.0]),
            "wanted at least 2 different numbers of workers to fit, got 1; measure more points",
        ),
        (
            lambda: laws.fit_usl([1, 2, 3], [1.0, 0.0, 1.0]),
            "wanted a finite value > 0, got 0; give a number in that range",
        ),
    ],
)
def test_messages(call, message: str) -> None:
    """A law says what it was given and what it accepts."""
    with pytest.raises(LawError) as error:
        call()
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, RidgelineError)
