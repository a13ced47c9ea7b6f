"""Trials: what counts as equal, and turns that leave nothing changed."""

import torch
from torch import Tensor

from ridgeline.autoparallel import trial
from ridgeline.autoparallel.graphs.program import trace_program
from ridgeline.autoparallel.trial import compare, take_turns


def test_a_baked_number_is_found() -> None:
    """A way that holds an old result is caught by the calls with changed inputs."""
    x = torch.randn(4)
    program = trace_program(lambda x: x * 2, x)
    held = x * 2
    difference = compare(lambda x: x * 2, lambda x: held.clone(), program, (x,))
    assert not difference.is_equal
    assert compare(lambda x: x * 2, program.run, program, (x,)).difference == 0.0


def test_rounding_of_what_should_be_zero_is_no_difference() -> None:
    """Tensors far smaller than the others are compared on the scale of the others."""
    large, small = torch.ones(3), torch.full((3,), 1e-8)
    program = trace_program(lambda x: (x, x * 0), large)
    noise = compare(lambda x: (x, small), lambda x: (x, small * 3), program, (large,))
    assert noise.is_equal
    assert not compare(lambda x: small, lambda x: small * 3, program, (large,)).is_equal


def test_turns_change_nothing() -> None:
    """State that the ways update is put back, and every way has one figure a turn."""
    counter = torch.zeros(1)

    def fn(x: Tensor) -> Tensor:
        counter.add_(1)
        return x + counter

    program = trace_program(fn, torch.ones(1))
    samples = take_turns({"a": fn, "b": program.run}, program, (torch.ones(1),))
    assert {name: len(own) for name, own in samples.items()} == {"a": trial.TURNS, "b": trial.TURNS}
    assert counter.item() == 0
    assert min(samples["a"]) > 0
