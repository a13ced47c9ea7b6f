"""Bytes under data and under model parallelism: what they grow with, and what the texts conclude from them."""

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies  # noqa: F401 - loads the profile of hypothesis
from ridgeline import laws
from ridgeline.errors import LawError
from ridgeline.laws import intensity

counts = st.integers(2, 10_000)
sizes = st.floats(1.0, 1e15)


def convolution(channels: int, pixels: int, samples: int) -> tuple[float, float]:
    """Bytes of the weights of a 3 x 3 convolution, and of its output."""
    return 4.0 * channels * channels * 9, 4.0 * samples * channels * pixels


def linear(inputs: int, outputs: int, samples: int) -> tuple[float, float, float]:
    return 4.0 * inputs * outputs, 4.0 * samples * inputs, 4.0 * samples * outputs


def test_the_examples_hold() -> None:
    """They are the texts' conclusions in numbers."""
    ran = doctest.testmod(intensity)
    assert ran.attempted > 8
    assert ran.failed == 0


@given(counts, st.integers(16, 512), st.integers(8, 64))
def test_convolutions_on_large_images_are_better_shared_by_samples(
    workers, samples, channels
) -> None:
    """On 56 x 56 pixels and more, with as many channels as networks have there."""
    weights, activations = convolution(channels, 56 * 56, samples)
    data = laws.data_parallel_bytes(weights, workers)
    assert data < laws.model_parallel_bytes(activations, activations, workers)


@given(counts, st.integers(1024, 32768), st.integers(1024, 32768), st.integers(1, 512))
def test_fully_connected_layers_are_better_shared_by_columns(
    workers, inputs, outputs, samples
) -> None:
    """With more than a thousand inputs and outputs, and fewer samples than that."""
    weights, taken, given_out = linear(inputs, outputs, samples)
    model = laws.model_parallel_bytes(given_out, taken, workers)
    assert model < laws.data_parallel_bytes(weights, workers)


@given(sizes, sizes, sizes, counts, counts)
def test_the_better_way_does_not_depend_on_the_workers(
    weights, taken, given_out, one, other
) -> None:
    """All three collectives go around rings: the ratio of bytes is the layer's own."""
    ratios = [
        laws.model_parallel_bytes(given_out, taken, n) / laws.data_parallel_bytes(weights, n)
        for n in (one, other)
    ]
    assert ratios[0] == pytest.approx(ratios[1])
    assert ratios[0] == pytest.approx((given_out + 2 * taken) / (2 * weights))


@given(sizes, sizes, sizes, counts, st.floats(1.0, 1e6))
def test_with_the_samples_of_equal_bytes_both_ways_send_as_much(
    weights, taken, given_out, workers, samples
) -> None:
    """Activations grow with the samples, weights do not."""
    data = laws.data_parallel_bytes(weights, workers)
    model = laws.model_parallel_bytes(given_out, taken, workers)
    grown = laws.samples_of_equal_bytes(samples, data, model) / samples
    assert laws.model_parallel_bytes(grown * given_out, grown * taken, workers) == pytest.approx(
        data
    )


@given(sizes, sizes)
def test_a_worker_alone_sends_nothing(first, second) -> None:
    """Whatever the layer: then its intensity is without bound."""
    assert laws.data_parallel_bytes(first, 1) == laws.model_parallel_bytes(first, second, 1) == 0.0
    assert laws.wire_intensity(first, 0.0) == math.inf


@given(sizes, sizes, st.floats(1.0, 1e15), st.floats(1.0, 1e12))
def test_below_the_ridge_point_sending_takes_longer(flops, num_bytes, peak, link) -> None:
    """That is what the ridge point of computing unit and link says."""
    below = laws.wire_intensity(flops, num_bytes) < laws.ridge_point(peak, link)
    sending, computing = num_bytes / link, flops / peak
    if sending != pytest.approx(computing):
        assert below == (sending > computing)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: laws.data_parallel_bytes(-1, 2), "wanted a finite gradient_bytes >= 0, got -1;"),
        (lambda: laws.model_parallel_bytes(1, -1, 2), "wanted a finite reduced_bytes >= 0, got -1;"),
        (lambda: laws.model_parallel_bytes(math.nan, 1, 2), "wanted a finite gathered_bytes >= 0, got nan;"),
        (lambda: laws.data_parallel_bytes(1, 0), "wanted a finite workers >= 1, got 0;"),
        (lambda: laws.wire_intensity(math.inf, 1), "wanted a finite flops >= 0, got inf;"),
        (lambda: laws.samples_of_equal_bytes(1, 1, 0), "wanted a finite model_bytes > 0, got 0;"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(call, message) -> None:
    with pytest.raises(LawError, match=f"^{message}"):
        call()
