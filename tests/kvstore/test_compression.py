"""Gradients in fewer bits: as plain Python computes them, and nothing is lost over time."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.runtime.kvstore.compression import KeyedCompression

TYPES: dict[str, dict[str, Any]] = {
    "1bit": {"type": "1bit"},
    "1bit, threshold": {"type": "1bit", "threshold": 0.25},
    "2bit": {"type": "2bit", "threshold": 0.4},
    "bf16": {"type": "bf16"},
    "int8": {"type": "int8"},
}
NUMBERS = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40)


def by_hand(params: dict[str, Any], value: float) -> float:
    """What arrives of a number in one or two bits."""
    threshold = params.get("threshold", 0.0)
    if params["type"] == "1bit":
        return 1.0 if value > threshold else -1.0
    bound = torch.tensor(threshold).item()  # as float32 has it
    return bound if value >= bound else -bound if value <= -bound else 0.0


@pytest.mark.parametrize("name", ["1bit", "1bit, threshold", "2bit"])
@given(steps=st.lists(NUMBERS, min_size=1, max_size=4))
def test_bits_are_those_of_plain_python(name: str, steps: list[list[float]]) -> None:
    """Step by step, with what was left out in the step before."""
    params, length = TYPES[name], len(steps[0])
    codec, left = KeyedCompression(params), [0.0] * length
    for numbers in steps:
        values = (numbers + [0.5] * length)[:length]
        sums = [
            (torch.tensor(v) + torch.tensor(kept)).item()
            for v, kept in zip(values, left, strict=True)
        ]
        wanted = [by_hand(params, value) for value in sums]
        left = [
            (torch.tensor(s) - torch.tensor(w)).item() for s, w in zip(sums, wanted, strict=True)
        ]
        coded = codec.encode("w", torch.tensor(values))
        bits = {"1bit": 1, "2bit": 2}[params["type"]]
        assert len(coded) == codec.num_bytes(length) == math.ceil(length * bits / 8)
        assert codec.decode(coded, length).tolist() == wanted


@pytest.mark.parametrize("name", TYPES)
@given(length=st.integers(0, 600), seed=st.integers(0, 1000))
def test_what_arrives_and_what_is_left_is_what_was_pushed(
    name: str, length: int, seed: int
) -> None:
    """The sum over all steps, within the rounding of float32; and bytes are as predicted."""
    codec = KeyedCompression(TYPES[name])
    generator = torch.Generator().manual_seed(seed)
    pushed = arrived = torch.zeros(length, dtype=torch.float64)
    for _ in range(5):
        values = torch.randn(length, generator=generator)
        coded = codec.encode("w", values)
        assert coded.dtype == torch.uint8
        assert len(coded) == codec.num_bytes(length)
        pushed = pushed + values.double()
        arrived = arrived + codec.decode(coded, length).double()
    left = codec._residuals.get("w", torch.zeros(length)).double()
    torch.testing.assert_close(arrived + left, pushed, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["1bit", "2bit", "int8"])
def test_an_overflow_does_not_stay(name: str) -> None:
    """What is no finite number is not remembered."""
    codec = KeyedCompression(TYPES[name])
    codec.encode("w", torch.tensor([math.inf, math.nan, 1.0]))
    assert codec._residuals["w"].isfinite().all()


def test_places_remember_apart() -> None:
    """One key of two devices has two of what is left out."""
    codec = KeyedCompression({"type": "2bit", "threshold": 1.0})
    assert codec.passed(("w", 0), torch.tensor([[0.6]])).tolist() == [[0.0]]
    assert codec.passed(("w", 1), torch.tensor([[0.6]])).tolist() == [[0.0]]
    assert codec.passed(("w", 0), torch.tensor([[0.6]])).tolist() == [[1.0]]
