"""The compiler's own choice of memory format: by which convolutions, and how plans are predicted for it."""

import msgspec
import pytest

from chained_workloads import Builder
from ridgeline.plan import Plan
from ridgeline.simulator.compiler.layout import conversion_bytes, lays_out
from ridgeline.simulator.model import as_run
from ridgeline.simulator.step import simulate
from ridgeline.workload import Op, TensorSpec, Workload
from strategies import make_machine


def convolution(taken: int, given: int, window: int = 3, groups: int = 1) -> Op:
    def spec(*shape: int) -> TensorSpec:
        return TensorSpec(shape=shape, stride=(), dtype="float32")

    arguments = {"args": [{"tensor": 0}, {"tensor": 1}, None, [1], [1], [1], False, [0], groups]}
    return Op(
        name="aten.convolution.default",
        phase="forward",
        module="",
        family="convolution",
        dtype="float32",
        inputs=(spec(2, taken, 8, 8), spec(given, taken // groups, window, window)),
        outputs=(spec(2, given, 8, 8),),
        arguments=msgspec.json.encode(arguments).decode(),
        flops=10**6,
        bytes_read=10**4,
        bytes_written=10**4,
    )


def step(*convolutions: Op, device: str = "cuda", more: int = 0) -> Workload:
    builder = Builder(64)
    builder.ops += convolutions
    for _ in range(more):
        builder.op("forward", "elementwise", (len(builder.ops) - 1,))
    workload = builder.workload(device=device)
    images = TensorSpec(shape=(2, 3, 8, 8), stride=(192, 64, 8, 1), dtype="float32")
    return msgspec.structs.replace(workload, batch=(images,))


PLAIN = convolution(64, 128)


@pytest.mark.parametrize(
    ("workload", "is_changed"),
    [
        (step(PLAIN), True),
        (step(PLAIN, device="cpu"), False),
        (step(PLAIN, more=298), True),
        (step(PLAIN, more=299), False),
        (step(PLAIN, convolution(128, 64)), False),
        (step(PLAIN, convolution(128, 65)), True),
        (step(PLAIN, convolution(128, 64, window=1)), True),
        (step(PLAIN, convolution(128, 128, groups=2)), False),
        (step(PLAIN, convolution(128, 128, groups=128)), True),
        (step(convolution(64, 64)), False),
        (step(), False),
    ],
)
def test_which_convolutions_make_the_compiler_change_the_format(
    workload: Workload, is_changed: bool
) -> None:
    """Few, narrowing, grouped or small ones do not."""
    assert lays_out(workload) is is_changed


def test_compiled_plans_are_predicted_from_the_format_that_they_run_in() -> None:
    """Where the compiler changes it, the plan as it is differs from channels-last by the conversion alone."""
    for first, other in ((PLAIN, convolution(64, 128, 1)), (PLAIN, convolution(256, 64))):
        plain = step(first, other)
        last = msgspec.structs.replace(plain, memory_format="channels_last")
        workload = msgspec.structs.replace(plain, variants=(last,))
        ours, theirs = (
            Plan(execution="compiled+graph"),
            Plan(execution="compiled+graph", memory_format="channels_last"),
        )
        machine = make_machine(device="cuda", rate=1e9)
        more_ns = (
            simulate(machine, workload, ours).step_ns - simulate(machine, workload, theirs).step_ns
        )
        assert as_run(workload, theirs) is last
        if not lays_out(workload):
            assert as_run(workload, ours) is workload
            assert more_ns == 0
            continue
        assert as_run(workload, ours) is last
        weights = 4 * (64 * 128 * 9 + 64 * 128)
        assert conversion_bytes(workload) == 2 * 4 * 2 * 3 * 64 + 4 * weights
        assert more_ns == pytest.approx(conversion_bytes(workload), rel=1e-6)
