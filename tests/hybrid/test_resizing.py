"""Interpolation in compiled programs: gradients by the eager kernel."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.nn import functional

from ridgeline.programs import inductor, resizing
from ridgeline.programs.resizing import use_own_gradients

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "factor": ((2, 3, 8, 8), {"scale_factor": 2.5, "mode": "bilinear"}),
    "fraction": ((2, 3, 8, 8), {"scale_factor": 2.3, "mode": "bilinear"}),
    "recomputed": (
        (2, 3, 8, 8),
        {"scale_factor": 2.3, "mode": "bilinear", "recompute_scale_factor": True},
    ),
    "smaller": ((2, 3, 9, 7), {"size": (4, 5), "mode": "bilinear"}),
    "aligned": ((2, 3, 8, 8), {"size": (11, 5), "mode": "bilinear", "align_corners": True}),
    "factors": ((2, 3, 8, 8), {"scale_factor": (2, 3), "mode": "bicubic"}),
    "one side": ((2, 3, 8, 8), {"size": 5, "mode": "bicubic", "align_corners": True}),
    "linear": ((2, 3, 8), {"scale_factor": 3, "mode": "linear"}),
    "trilinear": ((1, 2, 4, 4, 4), {"scale_factor": 2.0, "mode": "trilinear"}),
}


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    """The compiler's pool of processes would outlive the tests."""
    from torch._inductor import config

    torch._dynamo.reset()
    torch.manual_seed(0)
    with config.patch(compile_threads=1):
        yield


def gradients(run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The result and the gradient of its input."""
    x = x.detach().requires_grad_()
    y = run(x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    return [y.detach(), found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_it_interpolates_as_torch_does(name: str, dtype: torch.dtype) -> None:
    """Results and gradients, bit for bit: these are the same operators."""
    shape, options = CASES[name]

    def run(x: Tensor) -> Tensor:
        return functional.interpolate(x * 1.5, **options)

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        use_own_gradients(graph)
        assert functional.interpolate not in [node.target for node in graph.graph.nodes]
        return graph.forward

    x = torch.randn(shape, dtype=dtype)
    compiled = torch.compile(run, backend=backend)
    for got, wanted in zip(gradients(compiled, x), gradients(run, x), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Gradients take the matrix products that a GPU takes; the gradients that came in."""
    seen: list[Tensor] = []

    def taken(gradient: Tensor) -> bool:
        seen.append(gradient)
        return True

    monkeypatch.setattr(resizing, "_takes_products", taken)
    return seen


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_products_give_the_gradients_of_the_kernel(
    name: str, is_last: bool, products: list[Tensor]
) -> None:
    """In double precision, for every mode, whichever way the image lies in memory."""
    shape, options = CASES[name]
    x = torch.randn(shape, dtype=torch.float64)
    if is_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)

    def run(x: Tensor) -> Tensor:
        return resizing.interpolated(x, **options)

    def plain(x: Tensor) -> Tensor:
        return functional.interpolate(x, **options)

    torch.testing.assert_close(gradients(run, x), gradients(plain, x), rtol=1e-13, atol=1e-13)
    assert len(products) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_round_as_the_gradient_does(dtype: torch.dtype, products: list[Tensor]) -> None:
    """Not as autocast would have products, and not worse than the kernel."""
    x = torch.randn(2, 3, 16, 16, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = resizing.interpolated(x, scale_factor=4.0, mode="bilinear")
        gradient = torch.randn(y.shape).to(dtype).to(y.dtype)
        (got,) = torch.autograd.grad(y, x, gradient)
    exact = x.detach().double().requires_grad_()
    y = functional.interpolate(exact, scale_factor=4.0, mode="bilinear")
    (wanted,) = torch.autograd.grad(y, exact, gradient.double())
    distance = (got.double() - wanted).norm() / wanted.norm()
    assert got.dtype == dtype
    assert distance < torch.finfo(dtype).eps
    assert len(products) == 1


def test_products_of_each_sample_go_through(products: list[Tensor]) -> None:
    """By transforms of functions."""
    x = torch.randn(3, 2, 4, 4)

    def loss(run: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: run(x[None], scale_factor=2, mode="bilinear").square().sum()

    got = torch.func.vmap(torch.func.grad(loss(resizing.interpolated)))(x)
    wanted = torch.func.vmap(torch.func.grad(loss(functional.interpolate)))(x)
    torch.testing.assert_close(got, wanted)
    assert products


def test_compiled_products_are_right(
    products: list[Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a program of the compiler's, with what is around."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no program with the kernel

    def run(x: Tensor) -> Tensor:
        return functional.interpolate(x * 1.5, scale_factor=2.5, mode="bicubic").relu() + 1

    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    compiled = torch.compile(run, **inductor.plain_arguments())
    torch.testing.assert_close(gradients(compiled, x), gradients(run, x))
    assert products


@pytest.mark.parametrize("options", [{"mode": "nearest"}, {"mode": "bilinear", "antialias": True}])
def test_others_stay(options: dict[str, Any]) -> None:
    """They are no additions one by one."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(functional.interpolate, (x,), {"scale_factor": 2, **options})
    graph.output(node)
    use_own_gradients(fx.GraphModule({}, graph))
    assert node.target is functional.interpolate


@pytest.mark.parametrize("name", ["factor", "aligned", "factors"])
def test_compiled_gradients_are_right(name: str) -> None:
    """With what is around it fused."""
    shape, options = CASES[name]

    def run(x: Tensor) -> Tensor:
        return functional.interpolate(x * 1.5, **options).relu() + 1

    x = torch.randn(shape)
    compiled = torch.compile(run, **inductor.plain_arguments())
    torch.testing.assert_close(gradients(compiled, x), gradients(run, x))


def test_gradients_are_in_the_dtype_of_the_input() -> None:
    """Autocast may compute in another."""

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.interpolate(x, scale_factor=2, mode="bilinear").float()

    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(run, **inductor.plain_arguments())
    torch.testing.assert_close(gradients(compiled, x), gradients(run, x))


def test_gradients_of_each_sample_go_through() -> None:
    """By transforms of functions, in a compiled program."""

    def loss(x: Tensor) -> Tensor:
        return functional.interpolate(x[None], scale_factor=2, mode="bilinear").square().sum()

    def run(x: Tensor) -> Tensor:
        found: Tensor = torch.func.vmap(torch.func.grad(loss))(x)
        return found

    x = torch.randn(2, 3, 4, 4)
    compiled = torch.compile(run, **inductor.plain_arguments())
    torch.testing.assert_close(compiled(x), run(x))


def test_the_compiler_still_keeps_such_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In its cache, where the next start finds them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(x: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=2, mode="bilinear")

    counters.clear()
    x = torch.randn(2, 3, 8, 8)
    gradients(torch.compile(run, **inductor.plain_arguments()), x)
    assert dict(counters["aot_autograd"]).get("autograd_cache_bypass", 0) == 0
    assert counters["aot_autograd"]["autograd_cache_saved"] == 1
    torch._dynamo.reset()
    gradients(torch.compile(run, **inductor.plain_arguments()), x)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
