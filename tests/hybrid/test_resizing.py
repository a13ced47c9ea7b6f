"""Interpolation in compiled programs: gradients by the eager kernel."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.nn import functional

from ridgeline.runtime.hybrid import inductor
from ridgeline.runtime.hybrid.resizing import use_eager_gradients

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
        use_eager_gradients(graph)
        assert functional.interpolate not in [node.target for node in graph.graph.nodes]
        return graph.forward

    x = torch.randn(shape, dtype=dtype)
    compiled = torch.compile(run, backend=backend)
    for got, wanted in zip(gradients(compiled, x), gradients(run, x), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("options", [{"mode": "nearest"}, {"mode": "bilinear", "antialias": True}])
def test_others_stay(options: dict[str, Any]) -> None:
    """They are no additions one by one."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(functional.interpolate, (x,), {"scale_factor": 2, **options})
    graph.output(node)
    use_eager_gradients(fx.GraphModule({}, graph))
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
