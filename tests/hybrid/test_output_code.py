"""What is read of the compiler's modules: samples of GPUs by hand, and what it writes here for a CPU."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from compiler_modules import BACKWARD, FORWARD
from torch import Tensor, nn

from made_programs import chain
from ridgeline.compiled_program import CompilerKernel, CompilerProgram, product_sizes
from ridgeline.packages.loaded_programs import ProgramWatch, read_modules
from ridgeline.programs.output_code import read_program
from ridgeline.timeline import Timeline

BF16, FP32 = 2, 4
ELEMENTS = 512 * 64


def test_a_forward_program_of_a_gpu() -> None:
    """Each kernel once, in the order of its calls, with the bytes that it moves and what it came from."""
    relu = CompilerKernel(
        name="triton_poi_fused_relu_0",
        is_library=False,
        operators=("aten.addmm", "aten.relu"),
        bytes_read=64 * 128 * BF16 + 128 * FP32,
        bytes_written=64 * 128 * BF16,
    )
    product = CompilerKernel(
        name="mm",
        is_library=True,
        operators=("aten.t", "aten.addmm"),
        bytes_read=(64 * 32 + 32 * 128) * BF16,
        bytes_written=64 * 128 * BF16,
        shapes=((64, 32), (32, 128)),
        dtype="bfloat16",
    )
    attention = CompilerKernel(
        name="_scaled_dot_product_cudnn_attention",
        is_library=True,
        operators=("aten._attention",),
        bytes_read=8192 * BF16,
        bytes_written=8192 * BF16,
        shapes=((1, 2, 64, 64),),
        dtype="bfloat16",
    )
    # No comment tells where the second call of the kernel came from.
    again = msgspec.structs.replace(relu, operators=())
    found = read_program(FORWARD)
    assert found == CompilerProgram(
        phase="forward",
        kernels=(product, relu, attention, again),
        order=(0, 1, 2, 3),
        inputs=((128, 32), (128,), (64, 32)),
    )
    assert product_sizes(product) == (1, 64, 32, 128)


def test_a_backward_program_of_a_gpu() -> None:
    """Sums of a workspace, gradients by image alone, products beside the chain; joins are no work."""
    program = read_program(BACKWARD)
    assert program.phase == "backward"
    total, convolution, relu, product, handed = program.calls
    assert (relu.name, relu.shapes) == ("relu_", ((4, 8, 6, 6),))
    assert (total.name, total.shapes, total.num_bytes) == ("sum", ((24, 64),), 25 * 64 * FP32)
    assert (convolution.name, convolution.parts) == ("convolution_backward", 1)
    assert convolution.shapes == ((4, 16, 6, 6), (4, 8, 6, 6), (16, 8, 3, 3))
    assert (product.name, product_sizes(product)) == ("product", (1, 8, 144, 8))
    moved = (handed.name, handed.bytes_read, handed.bytes_written)
    assert moved == ("hand_out", 2 * 2 * 1152, 4 * 2 * 1152)
    both = BACKWARD.replace("[True, False, False]", "[True, True, False]")
    assert [kernel.parts for kernel in read_program(both).calls] == [1, 2, 1, 1, 1]


SIZED = """# AOT ID: ['0_backward']
def call(args):
    state, x = args
    args.clear()
    state_size = state.size()
    s20 = state_size[0]
    assert_size_stride(state, (s20, ), (1, ), 'input')
    buf0 = empty_strided_cpu((s20 // 8, 2*s20), (-(-2)*s20, 1), torch.float32)
    buf1 = extern_kernels.mm(buf0.view(s20, u0), x.view(2, s20), out=buf0)
    assert_size_stride(buf1, (u0, ), (1, ))
    buf2 = torch.ops.aten.relu.default(x.view(torch.int32))
    u0 = buf2.item()
def get_args():
    state = rand_strided((16, ), (1, ), device='cpu', dtype=torch.uint8)
    x = rand_strided((32, ), (1, ), device='cpu', dtype=torch.float32)
"""


def test_names_of_sizes_are_followed() -> None:
    """Of the state of a generator, say; what only the running program knows changes nothing known."""
    product, relu = read_program(SIZED).calls
    assert product.shapes == ((2, 32), (2, 16))
    assert (product.bytes_read, product.bytes_written) == (4 * (64 + 32), 4 * 64)
    assert relu.shapes == ((32,),)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            SIZED.replace("s20 // 8", "u0 + 1"),
            "wanted a size that is known before it runs, got u0",
        ),
        ("import triton", "wanted a module that names its graph in the first line, got none"),
        (
            FORWARD.replace("run(buf1, primals_2", "run(buf1, primals_9"),
            "wanted the tensors that triton_poi_fused_relu_0 takes, got 1 of 2",
        ),
        (FORWARD.replace("class Runner:", "class Runner"), "expected ':'"),
    ],
    ids=["unknown size", "no program", "unknown tensor", "not Python"],
)
def test_what_is_not_understood_is_an_error(source: str, reason: str) -> None:
    """No bytes are made up for it."""
    with pytest.raises((ValueError, SyntaxError), match=reason):
        read_program(source)


def _module(path: Path, source: str) -> ModuleType:
    path.write_text(source, encoding="utf-8")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    return module


def test_an_unreadable_program_gives_a_note(tmp_path: Path) -> None:
    """And hides the others, since a part tells nothing about the whole; single kernels are no programs."""
    forward = _module(tmp_path / "f.py", FORWARD)
    later = _module(tmp_path / "g.py", FORWARD)
    backward = _module(tmp_path / "b.py", BACKWARD)
    kernel = _module(tmp_path / "k.py", "import triton")
    other = _module(tmp_path / "c.py", BACKWARD.replace("[True, False,", "[True, True,"))
    found = read_modules([forward, backward, kernel, later, other])
    assert [program.phase for program in found.programs] == ["forward"] * 2 + ["backward"] * 2
    parts = [max(kernel.parts for kernel in program.kernels) for program in found.programs]
    assert parts == [1, 1, 2, 1]
    assert found.notes == ()
    broken = _module(tmp_path / "x.py", FORWARD.replace("run(buf1", "run(buf8"))
    found = read_modules([forward, broken])
    assert found.programs == ()
    (note,) = found.notes
    assert note == (
        f"what the compiler made could not be read from {tmp_path / 'x.py'} (wanted the tensors that "
        "triton_poi_fused_relu_0 takes, got 1 of 2): its kernels stay as assumed"
    )


@pytest.fixture
def compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache of the compiler, and none of what was compiled before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_chain_moves_its_inputs_and_outputs(compiled_here: None) -> None:
    """What elementwise operators pass on among themselves never reaches memory.

    What was loaded before is not read again, and what comes from the compiler's cache is read as well.
    """
    first, second = (torch.rand(512, 64) for _ in range(2))

    watch = ProgramWatch()
    torch.compile(chain, dynamic=False)(first, second)
    (program,) = watch.read().programs
    assert program.phase == "forward"
    assert [(k.bytes_read, k.bytes_written) for k in program.calls] == [
        (2 * ELEMENTS * FP32, 2 * ELEMENTS * FP32)
    ]
    assert ProgramWatch().read().programs == ()
    torch._dynamo.reset()
    watch = ProgramWatch()
    torch.compile(chain, dynamic=False)(first, second)
    assert watch.read().programs == (program,)


def test_a_step_compiled_here(compiled_here: None) -> None:
    """Both passes, the products with their sizes, and a trial's timeline that carries them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    batch = torch.rand(64, 16), torch.randint(0, 8, (64,))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    watch = ProgramWatch()
    torch.compile(loss_fn, dynamic=False)(model, batch).backward()
    trial = Timeline(
        origin="measured", title="", workers=1, spans=(), steps_ns=(1,), notes=("before",)
    )
    timeline = watch.noted(trial)
    forward, backward = timeline.programs
    assert timeline.notes == ("before",)
    assert (forward.phase, backward.phase) == ("forward", "backward")
    products = [product_sizes(k) for k in forward.calls if k.is_library]
    assert products == [(1, 64, 16, 32), (1, 64, 32, 8)]
    products = [product_sizes(k) for k in backward.calls if k.is_library]
    assert sorted(products) == [(1, 8, 64, 32), (1, 32, 64, 16), (1, 64, 8, 32)]
    assert {(32, 16), (32,), (8, 32), (8,), (64, 16), (64,)} == set(forward.inputs)
    # The first loop of forward reads and writes what lies between the products, in place.
    assert next(k for k in forward.calls if not k.is_library).num_bytes == 2 * 64 * 32 * FP32
