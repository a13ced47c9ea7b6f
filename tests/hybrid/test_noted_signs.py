"""Tensors whose sign or conjugation is only noted, as in `x.conj().imag`, and results in an argument's memory.

torch's operators look at the note; code of its compiler takes elements as they are written.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError, PackageError
from ridgeline.packages.callables import package_callable
from ridgeline.plan import Execution, Plan
from ridgeline.programs.inductor import NOTED
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.usefixtures("compiled_in_this_process")


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Iterator[Execution]:
    """Packages, which take longest to compile, run by operators that look at no note, as code does not."""
    with interpreted() if request.param == "packaged" else contextlib.nullcontext():
        yield request.param


def plain() -> Tensor:
    """With the strides of `noted()`."""
    return torch.randn(3, 8)[:, ::2]


def noted() -> Tensor:
    """Numbers that lie with the other sign."""
    return torch.randn(3, 4, dtype=torch.complex64).conj().imag


def waves(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


@pytest.mark.parametrize("mode", ["compiled", "packaged"], indirect=True)
def test_signs_that_are_only_noted_count(mode: Execution) -> None:
    """In an example and in a later call, also one with the strides of the example, and conjugated numbers."""
    for example in (plain(), noted()):
        with hybridize(waves, example, mode) as hybrid:
            for x in (noted(), plain(), noted()):
                torch.testing.assert_close(hybrid(x), waves(x))
            assert hybrid.report.counters == {"eager_calls": 0, "shapes": 1, "rebuilds": 0}
    number = torch.randn(3, 4, dtype=torch.complex64)
    with hybridize(lambda x: x.real + x.abs(), number, mode) as hybrid:
        for x in (number.conj(), number):
            torch.testing.assert_close(hybrid(x), x.real + x.abs())


def test_a_package_takes_inputs_with_noted_signs_and_no_such_state() -> None:
    """An input is written out; a tensor that the program reads at its place is refused."""
    scale = torch.ones(3, 4)[:, ::2]
    with package_callable(lambda x: torch.tanh(x) * scale, torch.randn(3, 2)) as packaged:
        x = torch.randn(2, 3, dtype=torch.complex64).conj().imag.t()
        torch.testing.assert_close(packaged(x), torch.tanh(x))
        scale.data = torch.randn(3, 2, dtype=torch.complex64).conj().imag
        with pytest.raises(PackageError, match="signs only noted"):
            packaged(x)


def test_tensors_of_the_callable_with_noted_signs() -> None:
    """Are run operator by operator where torch's compiler is called, with a warning, else refused."""
    weight = noted()

    def scaled(x: Tensor) -> Tensor:
        return torch.tanh(x * weight)

    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match="whose sign or conjugation is only noted"):
        hybridize(scaled, x, "packaged")
    with pytest.warns(UserWarning, match=NOTED[:60]), hybridize(scaled, x, "compiled") as hybrid:
        torch.testing.assert_close(hybrid(x), scaled(x))


def replaced(module: Any) -> None:
    module.scale = noted()


def noted_at_its_place(module: Any) -> None:
    module.scale.data = torch._neg_view(module.scale.data)


@pytest.mark.filterwarnings("ignore:what reads tensors whose sign")
@pytest.mark.parametrize("change", [replaced, noted_at_its_place])
@pytest.mark.parametrize("mode", ["script", "compiled", "packaged"], indirect=True)
def test_a_tensor_that_gets_a_noted_sign_later(
    change: Callable[[nn.Module], None], mode: Execution
) -> None:
    """A buffer with the same strides, at the same address, too: the next call shows it."""
    module, x = nn.Linear(4, 4), torch.randn(3, 4)
    module.register_buffer("scale", plain())
    module.register_forward_hook(lambda module, _, y: torch.tanh(y * module.scale))
    with hybridize(module, x, mode) as hybrid:
        for _ in range(2):
            torch.testing.assert_close(hybrid(x), module(x).detach())
            change(module)


def step_of(execution: Execution) -> PlannedStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        values = x.imag if x.is_complex() else x
        return (torch.tanh(values) - model(values)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return PlannedStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu")


@pytest.mark.filterwarnings("ignore:what reads tensors whose sign")
@pytest.mark.parametrize("execution", ["compiled", "step-graph"])
@pytest.mark.parametrize("is_complex", [False, True])
def test_batches_whose_signs_are_only_noted(execution: Execution, *, is_complex: bool) -> None:
    """Steps on them are the eager ones, with the strides of the batches that were compiled for, too."""
    with step_of(execution) as step, step_of("eager") as eager:
        for number in range(6):
            x = noted() if number > 3 else plain()
            if is_complex:
                written = torch.randn(3, 4, dtype=torch.complex64)
                x = written.conj() if number > 3 else written
            torch.testing.assert_close(step(x), eager(x))


def same_object(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * 2


def view(x: Tensor) -> Tensor:
    return x[1:].flatten(0)[:2]


def dense(x: Tensor) -> Tensor:
    return x.contiguous()


@pytest.mark.parametrize("fn", [same_object, view, dense])
def test_results_that_are_arguments_lie_as_they_do(fn: Callable[..., Any]) -> None:
    """With their strides and in their memory, in every call, whatever the example was."""
    for example in (torch.randn(3, 4), torch.randn(4, 3).t()):
        with hybridize(fn, example, "compiled", max_shapes=3) as hybrid:
            for x in (torch.randn(3, 4), plain(), torch.randn(4, 3).t(), noted()):
                check_places(fn, hybrid, x)


def test_packages_whose_results_are_arguments() -> None:
    """A further layout is a further package; signs that are only noted have none, and run eagerly."""
    with hybridize(same_object, torch.randn(3, 4), "packaged", max_shapes=3) as hybrid:
        for x in (torch.randn(3, 4), noted(), torch.randn(4, 3).t()):
            check_places(same_object, hybrid, x)
        assert hybrid.report.counters == {"eager_calls": 1, "shapes": 2, "rebuilds": 0}


def check_places(fn: Callable[..., Any], hybrid: Callable[..., Any], x: Tensor) -> None:
    wanted, got = fn(x), hybrid(x)
    for mine, theirs in zip(wanted, got, strict=True) if fn is same_object else [(wanted, got)]:
        torch.testing.assert_close(theirs, mine)
        assert theirs.stride() == mine.stride()
        places = [t.untyped_storage().data_ptr() for t in (mine, theirs, x)]
        assert (places[0] == places[2]) == (places[1] == places[2])
