"""What backward computes again is neither written by the forward pass nor read from it."""

from collections.abc import Sequence

import msgspec

from chained_workloads import Builder, tensor
from ridgeline.simulator.compiler.fusion import fused_runs

N = 4 * (1 << 20)
"""Bytes of a tensor of the builder."""


def step(
    names: Sequence[str] = ("mul", "tanh", "add"),
) -> Builder:
    """A product, elementwise operators whose results backward wants, and what takes the last of them."""
    b = Builder()
    product = b.op("forward", "matmul", more=(tensor(b.elements, "batch"),))
    at, made = product, []
    for name in names:
        at = b.op("forward", "elementwise", (at,), name=f"aten.{name}.default")
        made.append(at)
    b.op("forward", "matmul", (at,))
    gradient = b.op("backward", "matmul", more=(tensor(b.elements, "parameter"),))
    for index in reversed(made[:-1]):
        gradient = b.op("backward", "elementwise", (gradient, index))
    b.op("backward", "matmul", (gradient,))
    return b


def sizes(b: Builder) -> list[tuple[int, int]]:
    """Tensors that each kernel reads and writes, where programs draw random numbers themselves."""
    runs = fused_runs(b.workload(), "compiled", owns_random=True)
    return [(run.bytes_read // N, run.bytes_written // N) for run in runs]


def test_elementwise_results_are_made_again_from_the_product() -> None:
    """Forward writes its last result alone; backward reads gradient and product, and not the two between."""
    assert sizes(step()) == [(1, 1), (2, 1)]


def test_draws_and_what_is_written_in_place_are_stored() -> None:
    """Other draws are other numbers, but what follows one is made from it; what was overwritten is gone."""
    assert sizes(step(("native_dropout", "tanh", "add"))) == [(1, 2), (2, 1)]
    assert sizes(step(("mul_", "tanh_", "add"))) == [(1, 3), (3, 1)]


def test_what_a_library_takes_is_there_anyway() -> None:
    """It is written for the library, whatever backward does."""
    b = step()
    b.op("forward", "matmul", (1,))
    assert sizes(b) == [(1, 2), (2, 1)]


def test_a_narrow_root_stands_for_wide_results() -> None:
    """Half of the bytes are read where the product is of 16 bits."""
    b = step()
    narrow = msgspec.structs.replace(b.ops[0].outputs[0], dtype="bfloat16")
    b.ops[0] = msgspec.structs.replace(b.ops[0], outputs=(narrow,))
    b.ops[1] = msgspec.structs.replace(b.ops[1], inputs=(narrow,), bytes_read=N // 2)
    forward, backward = fused_runs(b.workload(), "compiled")
    assert (forward.bytes_read, forward.bytes_written) == (N // 2, N)
    assert (backward.bytes_read, backward.bytes_written) == (N + N // 2, N)


def test_a_sum_of_several_is_stored() -> None:
    """Reading both products again moves as much as storing what was made of them."""
    b = Builder()
    products = [b.op("forward", "matmul", more=(tensor(b.elements, "batch"),)) for _ in range(2)]
    at = b.op("forward", "elementwise", products)
    b.op("forward", "elementwise", (at,))
    gradient = b.op("backward", "matmul", more=(tensor(b.elements, "parameter"),))
    b.op("backward", "elementwise", (gradient, at))
    assert fused_runs(b.workload(), "compiled")[0].bytes_written == 2 * N


def test_one_program_stores_nothing_else() -> None:
    """The law: recomputing never moves more than storing does, in any form."""
    for form in ("compiled", "step-graph"):
        b = step()
        stored = step(("mul_", "tanh_", "add"))
        moved = sum(run.num_bytes for run in fused_runs(b.workload(), form))
        assert moved <= sum(run.num_bytes for run in fused_runs(stored.workload(), form))


def test_a_chain_of_thousands_is_followed() -> None:
    """A recurrence of elementwise operators is as long as its sequence."""
    b = Builder()
    at = b.op("forward", "matmul", more=(tensor(b.elements, "batch"),))
    for _ in range(3000):
        at = b.op("forward", "elementwise", (at,))
    b.op("forward", "matmul", (at,))
    gradient = b.op("backward", "matmul", more=(tensor(b.elements, "parameter"),))
    gradient = b.op("backward", "elementwise", (gradient, at - 1))
    b.op("backward", "elementwise", (gradient, at - 2))
    assert sizes(b) == [(1, 1), (2, 1)]
