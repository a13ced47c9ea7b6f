"""Modes, transforms and settings that begin after a capture: what they do to the code, they do to each form."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from repeated_blocks import TanhBlock
from ridgeline.autoparallel.parallelize import parallelize
from ridgeline.callables.calls.reads import CallReads
from ridgeline.callables.hybridize import hybridize
from ridgeline.capture.interception import MODES, TRANSFORMS
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

CALLS: tuple[Execution, ...] = ("script", "compiled", "regional", "packaged", "graph")
STEPS: tuple[Execution, ...] = (
    *("compiled", "regional", "step-graph", "packaged"),
    *("graph", "model-graph", "compiled+graph"),
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
_tanh = torch.tanh
_NOTHING = contextlib.nullcontext()


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    with interpreted():
        yield


def emulated(execution: Execution) -> contextlib.AbstractContextManager[None]:
    """Graphs on this host, for what replays them."""
    return emulated_graphs() if "graph" in execution and execution != "step-graph" else _NOTHING


class DoubledFunctions(TorchFunctionMode):
    """Doubles `torch.tanh`, where Python calls it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class DoubledOperators(TorchDispatchMode):
    """Doubles what `tanh` gives, whoever calls it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.tanh.default else result


class DoubledEverywhere(DoubledOperators):
    """It has torch's compiler run its programs as such."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Doubled(Tensor):
    """A tensor of which `torch.tanh` is twice as large."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.tanh else result


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(TanhBlock(), TanhBlock(), nn.Linear(4, 4))


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch) - 0.5).square().mean()


def given(index: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(index))


def noted(model: nn.Module) -> None:
    model[2].weight.data = torch._neg_view(model[2].weight.data)  # type: ignore[index]


Around = Callable[[], contextlib.AbstractContextManager[Any]]


def trained(
    execution: Execution,
    around: Around = contextlib.nullcontext,
    change: Callable[[nn.Module], None] = lambda _: None,
    batch: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[list[Tensor], list[str]]:
    """Losses of steps of which some come with something new, and notes."""
    with emulated(execution):
        return _trained(execution, around, change, batch)


def _trained(
    execution: Execution,
    around: Around,
    change: Callable[[nn.Module], None],
    batch: Callable[[Tensor], Tensor],
) -> tuple[list[Tensor], list[str]]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with PlannedStep(model, squares, optimizer, Plan(execution=execution), device="cpu") as step:
        for index in range(10):
            if index == 6:
                change(model)
            is_new = index in (6, 7)
            with around() if is_new else _NOTHING:
                loss = step(batch(given(index)) if is_new else given(index))
                losses.append(loss.detach().as_subclass(Tensor))
        return losses, step.notes


@pytest.mark.filterwarnings("ignore:what reads tensors whose sign")
@pytest.mark.parametrize(
    "around", [DoubledFunctions, lambda: mock.patch.object(torch, "tanh", lambda x: _tanh(x) * 2)]
)
def test_what_the_compiler_has_read_through_is_done_once(around: Around) -> None:
    """Programs that run operator by operator, since a sign is only noted, call operators and nothing else."""
    wanted, got = trained("eager", around, noted), trained("compiled", around, noted)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [DoubledOperators, DoubledEverywhere])
@pytest.mark.parametrize("execution", STEPS)
def test_modes_see_the_operators_of_each_step(execution: Execution, mode: Around) -> None:
    """A step under one runs as it was written; others stay as they are."""
    wanted, got = trained("eager", mode), trained(execution, mode)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)
    assert f"steps {MODES}" in got[1]
    assert any("equals the eager step" in note for note in got[1])


@pytest.mark.parametrize("execution", STEPS)
def test_batches_with_functions_of_their_own(execution: Execution) -> None:
    """A subclass of Tensor with another `tanh` in some steps."""

    def batch(x: Tensor) -> Tensor:
        return x.as_subclass(Doubled)

    wanted, got = trained("eager", batch=batch), trained(execution, batch=batch)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_weights_with_functions_of_their_own(execution: Execution) -> None:
    """What the compiler would read wrongly runs as it was written."""

    def change(model: nn.Module) -> None:
        layer: Any = model[0].linear  # type: ignore[index]
        layer.weight = nn.Parameter(layer.weight.data.as_subclass(Doubled))

    wanted, got = trained("eager", change=change), trained(execution, change=change)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)


def tangent(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        result = fn(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(result).tangent


def under_mode(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with DoubledEverywhere():
        return fn(x)


WAYS: dict[str, tuple[Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], str]] = {
    "dispatch mode": (under_mode, MODES),
    "tangent": (tangent, TRANSFORMS),
    "functionalize": (lambda fn, x: torch.func.functionalize(fn)(x), TRANSFORMS),
    "vmap": (lambda fn, x: torch.vmap(fn)(torch.stack([x, -x])), TRANSFORMS),
    "jvp": (lambda fn, x: torch.func.jvp(fn, (x,), (x,))[1], TRANSFORMS),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", CALLS)
def test_calls_that_somebody_intercepts(mode: Execution, way: str) -> None:
    """They run as they were written, and the next call by the program again."""
    model = made()
    call, why = WAYS[way]
    with emulated(mode), torch.no_grad(), hybridize(model, given(0), mode) as hybrid:
        for index in range(2):
            torch.testing.assert_close(call(hybrid, given(index)), call(model, given(index)))
            torch.testing.assert_close(hybrid(given(index)), model(given(index)))
        assert hybrid.report.counters["eager_calls"] == 2
        assert f"calls {why}" in hybrid.report.notes


def test_calls_of_what_cannot_be_read_that_somebody_intercepts() -> None:
    """The same where `torch.compile` guards the program."""
    model = made()

    def branching(x: Tensor) -> Tensor:
        return model(x) if x.sum() > -1e6 else x

    with torch.no_grad(), hybridize(branching, given(0), "compiled") as hybrid:
        assert "by torch.compile" in " ".join(hybrid.report.notes)
        for call, _ in WAYS.values():
            if call is not WAYS["vmap"][0]:  # nor can that read a value
                torch.testing.assert_close(call(hybrid, given(1)), call(branching, given(1)))


@pytest.mark.parametrize("way", ["dispatch mode", "tangent"])
@pytest.mark.parametrize("needs_gradients", [False, True])
def test_parallel_calls_that_somebody_intercepts(way: str, *, needs_gradients: bool) -> None:
    """They run the function as it was written."""
    model, other = made(), made()

    def both(x: Tensor) -> Tensor:
        return model(x) + other(x + 1)

    call = WAYS[way][0]
    with (
        torch.set_grad_enabled(needs_gradients),
        parallelize(both, given(0), lanes=2, mode="serial") as parallel,
    ):
        torch.testing.assert_close(call(parallel, given(1)), call(both, given(1)))
        torch.testing.assert_close(parallel(given(1)), both(given(1)))
        assert parallel.report.counters == {"changed": 1}


def attention(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("mode", ["compiled", "packaged", "graph"])
def test_attention_among_other_kernels(mode: Execution) -> None:
    """Is captured once more where the choice of its kernel is another, and refused where there is none."""
    x = torch.randn(1, 2, 4, 8)
    with emulated(mode), torch.no_grad(), hybridize(attention, x, mode) as hybrid:
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(hybrid(x), attention(x))
        assert hybrid.report.counters == {"eager_calls": 0, "shapes": 2, "rebuilds": 0}
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            pytest.raises(RuntimeError, match="No viable backend"),
        ):
            hybrid(x)
        torch.testing.assert_close(hybrid(x), attention(x))


class Precision:
    """Of a kind of operator, on this host."""

    def __init__(self, kind: str) -> None:
        self._of = getattr(torch.backends.mkldnn, kind)

    def __enter__(self) -> None:
        self._before = self._of.fp32_precision
        self._of.fp32_precision = "bf16"

    def __exit__(self, *_: object) -> None:
        self._of.fp32_precision = self._before


@pytest.mark.parametrize("kind", ["matmul", "conv"])
def test_the_precision_of_kernels_belongs_to_a_program(kind: str) -> None:
    """That of its own operators: products have nothing to do with convolutions."""
    model, x = nn.Linear(4, 4), given(0)
    convolution, image = nn.Conv1d(4, 4, 3), torch.randn(1, 4, 8)
    products, images = CallReads(model, (x,)).guards, CallReads(convolution, (image,)).guards
    with torch.no_grad(), Precision(kind):
        assert products.holds({"fn": model, "args": (x,)}) == (kind == "conv")
        assert not images.holds({"fn": convolution, "args": (image,)})
        assert "kernels" in images.difference({"fn": convolution, "args": (image,)})
    with torch.no_grad():
        assert products.holds({"fn": model, "args": (x,)})
        assert images.holds({"fn": convolution, "args": (image,)})


def test_kernels_chosen_inside_of_a_program() -> None:
    """A program that chooses kernels itself, and is compiled in two pieces around that, runs as written."""

    def chosen(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            y = attention(x)
            torch._dynamo.graph_break()
            return attention(y)

    x = torch.randn(1, 2, 4, 8)
    with torch.no_grad(), hybridize(chosen, x, "compiled") as hybrid:
        for _ in range(2):
            torch.testing.assert_close(hybrid(x), chosen(x))
