"""What the compiler does to a library's operators: padded products, free biases, loops that scatter."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chained_workloads import Builder, tensor
from ridgeline.machine import Setting
from ridgeline.plan import Plan
from ridgeline.simulator.compiler.rewriting import ALIGNED, rewritten_seconds, writes_loop
from ridgeline.simulator.pricing.costs import Prices
from ridgeline.simulator.step import simulate
from ridgeline.workload import Op, TensorSpec
from strategies import make_machine

PRICES = Prices(make_machine(device="cuda", rate=1e9), Setting(device="cuda", workers=1), "as-is")


def spec(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(shape=shape, stride=(), dtype=dtype)


def made(name: str, *inputs: TensorSpec, output: TensorSpec, flops: int = 0) -> Op:
    return Op(
        name=name,
        phase="forward",
        module="",
        family="matmul" if "mm" in name else "convolution",
        dtype=output.dtype,
        inputs=inputs,
        outputs=(output,),
        arguments="[]",
        flops=flops,
        bytes_read=0,
        bytes_written=0,
    )


@given(columns=st.integers(1, 100), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_unaligned_products_of_16_bits_run_at_the_rate_of_their_size(
    columns: int, dtype: str
) -> None:
    """All others, and those that are faster already, keep what was timed."""
    left, right = spec(64, 128, dtype=dtype), spec(128, columns, dtype=dtype)
    product = made(
        "aten.mm.default", left, right, output=spec(64, columns, dtype=dtype), flops=10**6
    )
    rated_s = PRICES.by_curve(product)
    is_padded = dtype == "bfloat16" and columns % ALIGNED
    assert rewritten_seconds(PRICES, product, 3 * rated_s) == (
        rated_s if is_padded else 3 * rated_s
    )
    assert rewritten_seconds(PRICES, product, rated_s / 3) == rated_s / 3


def test_the_bias_of_a_convolution_costs_no_pass() -> None:
    """It is saved what reading and writing the result takes; a convolution without one keeps its time."""
    image, weight, bias = spec(8, 3, 32, 32), spec(16, 3, 3, 3), spec(16)
    result = spec(8, 16, 32, 32)
    biased = made("aten.convolution.default", image, weight, bias, output=result, flops=10**6)
    bare = made("aten.convolution.default", image, weight, output=result, flops=10**6)
    pass_s = PRICES.copy_seconds(2 * 2 * 8 * 16 * 32 * 32)
    assert rewritten_seconds(PRICES, biased, 5 * pass_s) == pytest.approx(4 * pass_s)
    assert rewritten_seconds(PRICES, bare, 5 * pass_s) == 5 * pass_s
    backward = msgspec.structs.replace(biased, phase="backward")
    assert rewritten_seconds(PRICES, backward, 5 * pass_s) == 5 * pass_s


@pytest.mark.parametrize(
    ("name", "dtype", "is_loop"),
    [
        ("aten.index.Tensor", "bfloat16", True),
        ("aten.index_put_.default", "float32", True),
        ("aten.index_add.default", "float32", True),
        ("aten.index_add.default", "bfloat16", False),
        ("aten.index_put.default", "bfloat16", True),
        ("aten.index_put.default", "int64", False),
        ("aten.scatter_reduce.two", "float32", False),
        ("aten.embedding_dense_backward.default", "float32", True),
        ("aten.upsample_bilinear2d.default", "float32", True),
        ("aten.upsample_bilinear2d_backward.default", "float32", True),
        ("aten._embedding_bag.default", "float32", False),
        ("aten.mm.default", "float32", False),
    ],
)
def test_loops_that_gather_and_scatter(name: str, dtype: str, is_loop: bool) -> None:
    """Additions by index are atomic, where those exist and the compiler does not prefer the library."""
    assert writes_loop(made(name, output=spec(4, dtype=dtype))) is is_loop


@pytest.mark.parametrize(
    ("precision", "phase", "is_narrow"),
    [("bf16", "backward", True), ("bf16", "forward", False), ("as-is", "backward", False)],
)
def test_backward_products_run_as_autocast_has_it(
    precision: str, phase: str, is_narrow: bool
) -> None:
    """Compiled, the backward pass lies in the forward's autocast region; eagerly it lies in none."""
    left, right = spec(64, 128, dtype="float32"), spec(128, 64, dtype="float32")
    result = spec(64, 64, dtype="float32")
    product = made("aten.bmm.default", left, right, output=result, flops=10**6)
    product = msgspec.structs.replace(product, phase=phase, bytes_read=10**6)
    narrow = msgspec.structs.replace(product, dtype="bfloat16", bytes_read=10**6 // 2)
    eager_s = 10 * PRICES.by_curve(product)
    wanted_s = PRICES.by_curve(narrow) if is_narrow else eager_s
    assert rewritten_seconds(PRICES, product, eager_s, precision) == wanted_s
    assert rewritten_seconds(PRICES, product, 1e-12, precision) == 1e-12


@pytest.mark.parametrize("more_s", [0.0, 5e-3])
def test_elements_that_lie_anywhere_are_read_no_faster_within_a_kernel(more_s: float) -> None:
    """What taking them was timed to take over the seconds of its bytes stays, whatever it is joined with."""
    b = Builder(1000)
    index = TensorSpec(shape=(1000,), stride=(1,), dtype="int64", role="batch")
    table, wide = tensor(4000, "parameter"), tensor(1000)
    b.op("forward", "gather", more=(table, index), output=wide, name="aten.index.Tensor")
    b.op("forward", "elementwise", (0,), output=wide)
    workload, plan = b.workload(device="cuda"), Plan(execution="compiled+graph")
    taking = workload.ops[0]
    timed = {
        taking.key: taking.bytes_moved * 1e-9 + more_s
    }  # of a machine that moves a gigabyte a second
    untimed_ns = simulate(make_machine(device="cuda"), workload, plan).step_ns
    timed_ns = simulate(make_machine(device="cuda", timings=timed), workload, plan).step_ns
    assert timed_ns - untimed_ns == pytest.approx(more_s * 1e9, abs=2)
