"""Trying ways to run a program: whether they give the results of the function, then how long they take."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.autoparallel.graphs.program import Program
from ridgeline.callables.calls.equivalence import (
    CallComparison,
    largest_difference,
    tolerance_of,
)
from ridgeline.recording.turns import call_s, calls_in, turns_of, wait_for
from ridgeline.state.random_state import seed_all
from ridgeline.state.saved_state import SavedState, preserved
from ridgeline.tensors.call_perturbation import perturbed_inputs

NUM_CALLS = 3
"""Calls that are compared: the example, and two with changed inputs."""
TURNS = 15
LEAST_TURNS = 5
BLOCK_S = 2e-3
"""One turn calls a way for about this long, or once."""
LIMIT_S = 20.0
"""No further turn begins after so many seconds, once there are `LEAST_TURNS`."""

LEAST_SIZE = 1e-2
"""Tensors whose largest value is below this share of the largest of all are compared as if they reached
it: the gradient of a bias before a batch norm, say, is zero but for rounding."""

PARTS = "results, then state, then gradients"

Call = Callable[..., Any]


def compare(fn: Call, way: Call, program: Program, args: tuple[Any, ...]) -> CallComparison:
    """Call both with the same inputs, state and random numbers, several times with changed inputs.

    Compared are results, state and gradients that the function sets. Everything is afterwards as it was.

    Cost: Six calls, copies of the state, and a wait for the device.
    """
    worst = CallComparison(0.0, 0.0, "nothing")
    plain = pytree.tree_map_only(Tensor, torch.detach, args)
    with _untouched(program) as saved:
        for index in range(NUM_CALLS):
            given = _with_gradients(perturbed_inputs(plain, index), args)
            expected, got = (_outcome(run, given, program, saved, index) for run in (fn, way))
            # By the types of arguments and results: 16 bits anywhere on the way make sums of another order
            # differ more.
            tolerance = tolerance_of(pytree.tree_leaves((args, expected)))
            difference, where = largest_difference(expected, got, PARTS, least_size=LEAST_SIZE)
            if index == 0 or difference > worst.difference:
                worst = CallComparison(difference, tolerance, f"{where} of call {index + 1}")
            # Another structure, or a NaN on one side: further calls can show nothing worse.
            if math.isinf(difference):
                break
    return worst


def take_turns(
    ways: Mapping[str, Call], program: Program, args: tuple[Any, ...]
) -> dict[str, list[float]]:
    """Seconds of a call of each way, one figure a turn: a change of the machine's speed meets all alike.

    Cost: Up to `TURNS` blocks of `BLOCK_S` or one call for each way; about `LIMIT_S` at most. Waits for the
    device.
    """
    wait = partial(wait_for, *sorted({op.device for op in program.operations}, key=str))
    begin = time.perf_counter()

    def called(way: Call) -> None:
        way(*args)
        _drop_grads(program)

    with _untouched(program):
        blocks: dict[str, Callable[[], float]] = {}
        for name, way in ways.items():
            call = partial(called, way)
            # Once before it is timed: libraries tune themselves in their first call.
            call_s(call, 1, wait)
            blocks[name] = partial(call_s, call, calls_in(BLOCK_S, call_s(call, 1, wait)), wait)
        turns: list[dict[str, float]] = []
        for turn in itertools.islice(turns_of(blocks), TURNS):
            turns.append(turn)
            if len(turns) >= LEAST_TURNS and time.perf_counter() - begin > LIMIT_S:
                break
    return {name: [turn[name] for turn in turns] for name in ways}


def _outcome(
    run: Call, args: tuple[Any, ...], program: Program, saved: SavedState, index: int
) -> Any:
    """Copies of what a call gives and leaves: result, state, gradients."""
    saved.restore_tensors()
    # Both have the same state and draw the same numbers, or differences would say nothing.
    seed_all(index)
    given = _with_gradients(args, args)
    result = pytree.tree_map_only(Tensor, _copied, run(*given))
    state = [_copied(tensor) for tensor in saved.tensors]
    grads = [program.state[name].grad for name in program.grads]
    grads = [None if grad is None else _copied(grad) for grad in grads]
    _drop_grads(program)
    return result, state, grads


@contextmanager
def _untouched(program: Program) -> Iterator[SavedState]:
    """State, random state and gradients are afterwards as they were."""
    grads = {name: program.state[name].grad for name in program.grads}
    _drop_grads(program)
    try:
        with preserved(list(program.state.values())) as saved:
            yield saved
    finally:
        for name, grad in grads.items():
            program.state[name].grad = grad


def _drop_grads(program: Program) -> None:
    for name in program.grads:
        program.state[name].grad = None


def _with_gradients(args: tuple[Any, ...], like: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the arguments that require gradients where the others do."""
    leaves, structure = pytree.tree_flatten(args)
    copies = [
        _copied(leaf).requires_grad_(other.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf, other in zip(leaves, pytree.tree_leaves(like), strict=True)
    ]
    return pytree.tree_unflatten(copies, structure)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
