"""What the compiler makes for a GPU is read as it is written there, and tells of the whole step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from made_programs import chain
from ridgeline.compiled_program import CompilerProgram, product_sizes
from ridgeline.packages.loaded_programs import ProgramWatch
from ridgeline.plan import Kernels, Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.simulator.compiler.coverage import why_unread
from ridgeline.tracing.capture import trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ELEMENTS = 4096 * 64
FP32 = 4


@pytest.fixture(autouse=True)
def compiled_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler's pool of processes would outlive the test; its cache is empty."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_a_chain_moves_its_inputs_and_outputs() -> None:
    """What elementwise operators pass on among themselves never reaches memory."""
    first, second = (torch.rand(4096, 64, device="cuda") for _ in range(2))

    watch = ProgramWatch()
    torch.compile(chain, dynamic=False)(first, second)
    (program,) = watch.read().programs
    (kernel,) = program.calls
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * ELEMENTS * FP32, 2 * ELEMENTS * FP32)


def test_gathered_rows_are_added_by_one_kernel() -> None:
    """Besides the one that fills with zeros; neither reads or writes what was gathered."""
    source = torch.rand(1000, 64, device="cuda")
    edges = torch.randint(0, 1000, (2, 50_000), device="cuda")

    def pass_on(x: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

    watch = ProgramWatch()
    torch.compile(pass_on, dynamic=False)(source, edges)
    (program,) = watch.read().programs
    moved = [(k.bytes_read, k.bytes_written) for k in program.calls]
    assert moved == [
        (0, 1000 * 64 * FP32),
        (2 * 50_000 * 8 + 1000 * 64 * FP32, 50_000 * 64 * FP32),
    ]


@pytest.mark.parametrize("kernels", ["default", "combined"])
def test_programs_are_the_whole_step(kernels: Kernels) -> None:
    """All products of the trace are found in them, also where weight gradients run beside the chain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 16))
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batch = torch.rand(512, 64, device="cuda"), torch.randint(0, 16, (512,), device="cuda")
    workload = trace(model, loss_fn, optimizer, batch)
    plan = Plan(execution="compiled+graph", kernels=kernels)
    watch = ProgramWatch()
    with PlannedStep(model, loss_fn, optimizer, plan, device="cuda") as step:
        for _ in range(6):
            step(batch)
        found = watch.read()
    assert found.notes == ()
    assert why_unread(workload, plan, found.programs) == ""
    wanted = sorted(_sizes(op.inputs) for op in workload.ops if op.family == "matmul")
    assert sorted(_products(found.programs)) == wanted


def _products(programs: tuple[CompilerProgram, ...]) -> list[tuple[int, ...]]:
    found = (product_sizes(k) for program in programs for k in program.calls if k.is_library)
    return [tuple(sorted(sizes)) for sizes in found if sizes is not None]


def _sizes(inputs: Any) -> tuple[int, ...]:
    left, right = (spec.shape for spec in inputs[-2:])
    return tuple(sorted((1, *left, right[1])))
