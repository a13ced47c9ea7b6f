"""Sums that a GPU takes in parts end in a small kernel, which compiled steps are charged."""

import msgspec
import pytest

from chained_workloads import Builder, tensor
from ridgeline.plan import Plan
from ridgeline.simulator.compiler.made import KERNEL_RATE
from ridgeline.simulator.compiler.second_stages import BUSY, LEAST_REDUCED, second_stages
from ridgeline.simulator.step import simulate
from strategies import make_machine


@pytest.mark.parametrize(
    ("name", "family", "reduced", "results", "stages"),
    [
        ("sum", "reduction", LEAST_REDUCED, BUSY - 1, 1),
        ("sum", "reduction", LEAST_REDUCED - 1, BUSY - 1, 0),
        ("sum", "reduction", LEAST_REDUCED, BUSY, 0),
        ("max_pool2d_with_indices", "reduction", LEAST_REDUCED, 64, 0),
        ("native_batch_norm_backward", "normalization", 1, 64, 3),
        ("native_layer_norm", "normalization", 64, BUSY, 0),
        ("mul", "elementwise", 1, 64, 0),
    ],
)
def test_which_operators_have_them(
    name: str, family: str, reduced: int, results: int, stages: int
) -> None:
    """Long sums to few results, and statistics across samples; rows and poolings do without."""
    b = Builder()
    more, output = (tensor(reduced * results, "batch"),), tensor(results)
    b.op("backward", family, more=more, output=output, name=f"aten.{name}.default")
    assert second_stages(b.ops[0]) == stages


@pytest.mark.parametrize(("device", "added"), [("cuda", 1), ("cpu", 0)])
def test_each_takes_the_smallest_kernel(device: str, added: int) -> None:
    """On a GPU; on a CPU a sum is one loop."""
    steps = []
    for results in (BUSY, BUSY - 1):
        b = Builder()
        more = (tensor(LEAST_REDUCED * BUSY, "batch"),)
        at = b.op("forward", "elementwise", more=more, output=more[0])
        b.op("backward", "reduction", (at,), output=tensor(results), name="aten.sum.dim_IntList")
        # Of the reduction nothing but the number of its results differs.
        b.ops[1] = msgspec.structs.replace(b.ops[1], bytes_written=4 * BUSY)
        execution = "compiled+graph" if device == "cuda" else "compiled"
        machine = make_machine(device=device, rate=1e6)
        steps.append(simulate(machine, b.workload(device=device), Plan(execution=execution)))
    kernels = [step.counters["own_kernels"] for step in steps]
    assert kernels[1] - kernels[0] == added
    smallest_ns = added * 1e3 / KERNEL_RATE  # a byte at 1 MB/s
    assert steps[1].step_ns - steps[0].step_ns == pytest.approx(smallest_ns, abs=2)
