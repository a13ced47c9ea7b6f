"""What a capture can bake in is caught before it is used, and what a program reads is found."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.calls.equivalence import compare_calls, largest_difference
from ridgeline.callables.calls.forms import make_form
from ridgeline.callables.hybridize import Hybrid, hybridize
from ridgeline.errors import CaptureError, EquivalenceError
from ridgeline.guards.reading import UnreadableError
from ridgeline.plan import Execution

pytestmark = pytest.mark.usefixtures("compiled_in_this_process")

NAN = float("nan")


def mlp(features: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, 2))


class Frozen(nn.Module):
    """Computes with a copy of its weight from the first call: a weight baked in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.weight.detach().sum())


def counting() -> Any:
    calls = [0]

    def count(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * calls[0]

    return count


def branching(x: Tensor) -> Tensor:
    return x + 1 if bool(x.sum() > 0) else x - 1


def reading(x: Tensor) -> Tensor:
    return x * x.abs().max().item()


FLAG = False


def flipping(x: Tensor) -> Tensor:
    global FLAG  # noqa: PLW0603 - the very habit that a capture bakes in
    FLAG = not FLAG
    return x + 1 if FLAG else x - 1


def same(hybrid: Hybrid, fn: Any, *args: Any) -> None:
    with torch.no_grad():
        expected = fn(*args)
    torch.testing.assert_close(hybrid(*args), expected)


@pytest.mark.parametrize("mode", ["script", "compiled"])
@pytest.mark.parametrize(
    ("make", "written"),
    [
        (counting, "calls (a list)"),
        (lambda: flipping, f"{__name__}.FLAG (a module)"),
    ],
    ids=["counter", "flag"],
)
def test_a_python_value_that_the_program_changes_itself_is_caught(
    mode: Execution, make: Any, written: str
) -> None:
    """A counter or a flag would stand still in a captured program: refused by name."""
    with pytest.raises(CaptureError, match=f"got one that writes {re.escape(written)}, which"):
        hybridize(make(), torch.randn(4), mode)


@pytest.mark.parametrize("fn", [branching, reading])
def test_a_trace_that_bakes_a_value_read_to_the_host_is_not_used(fn: Any) -> None:
    """What reads a value is left to the compiler with its own guards; the results stay those of eager."""
    with hybridize(fn, torch.randn(4), "compiled") as hybrid:
        assert "by torch.compile with its guards at every call" in hybrid.report.notes[0]
        for x in (torch.ones(4), -torch.ones(4), torch.randn(4)):
            same(hybrid, fn, x)


def test_what_cannot_be_read_is_refused_with_its_line() -> None:
    """Nobody could say when a program that was captured around it has to be captured again."""
    message = (
        "wanted a program that torch's compiler can read in one piece, got a branch on the value of a tensor "
        r"\(test_call_equivalence.py:\d+ in branching\); do that around the call, or use "
    )
    compiled = "mode='compiled', which leaves it to Python, or "
    with pytest.raises(UnreadableError, match=f"^{message}{compiled}mode='eager'$"):
        hybridize(lambda x, *rest: branching(x), torch.randn(4), "script")
    with pytest.raises(UnreadableError, match=f"^{message}mode='eager'$"):
        hybridize(branching, torch.randn(4), "compiled", static_io=True)


def test_a_weight_baked_in_is_caught_by_changing_it() -> None:
    """The check scales parameters in place and puts them back bitwise; a frozen copy shows."""
    module = Frozen()
    before = module.weight.detach().clone()
    frozen = float(module.weight.detach().sum())
    outcome = compare_calls(module, lambda x: x * frozen, (torch.randn(4),), [module.weight])
    assert not outcome.is_equal
    assert torch.equal(module.weight, before)


def test_the_random_state_and_the_example_are_left_alone() -> None:
    """Making a Hybrid draws no numbers from the program's stream, and writes into no example."""
    module, x = mlp(), torch.randn(1, 8)
    kept, state = x.clone(), torch.get_rng_state()
    hybridize(module, x, "script").close()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, kept)


def test_a_function_that_writes_into_its_arguments_is_refused() -> None:
    """Captured programs work on copies of their arguments, so such a write would be lost."""
    with pytest.raises(
        CaptureError, match="wanted a function that leaves its arguments as they are"
    ):
        hybridize(lambda x: x.add_(1), torch.randn(4), "compiled")


def test_packaged_follows_the_weights_and_a_constant_in_it_is_caught() -> None:
    """The form compiled ahead of time is held to the same rules: weights by reference, no Python number."""
    module, factor = mlp(), [1.0]

    def fn(x: Tensor) -> Tensor:
        return module(x) * factor[0]

    args = (torch.randn(1, 8),)
    form = make_form("packaged", fn, args)
    assert compare_calls(fn, form.call, args, [*module.parameters()]).is_equal
    factor[0] = 1.5
    outcome = compare_calls(fn, form.call, args, [*module.parameters()])
    form.close()
    with pytest.raises(
        EquivalenceError, match="wanted mode 'packaged' to give the results of eager"
    ):
        outcome.check("packaged")


def test_results_without_a_number_say_nothing_of_a_program() -> None:
    """NaN equals NaN, of whatever program: at least one call has to give numbers."""

    def root(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1.0, x.sqrt()

    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1.0, x.sqrt() * 2.0

    nothing = torch.full((3,), NAN)
    with pytest.raises(CaptureError) as caught:
        compare_calls(root, wrong, (nothing,), [])
    assert str(caught.value) == (
        "wanted example inputs for which the function gives numbers, got NaN alone in tensor 0 of each result, "
        "beside which any program would look right; give other inputs, or use mode='eager'"
    )
    # Of negative numbers alone the example's own call has no root; one with the sign turned has.
    assert not compare_calls(root, wrong, (torch.tensor([-1.0, -2.0, -4.0]),), []).is_equal
    assert compare_calls(root, root, (torch.tensor([-1.0, -2.0, -4.0]),), []).is_equal


@pytest.mark.parametrize(
    ("expected", "got", "difference"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.25),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("inf")]), 0.0),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0.0),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), float("inf")),
        (torch.tensor([NAN + 1j]), torch.tensor([NAN + 1j]), 0.0),
        (torch.tensor([NAN + 1j]), torch.tensor([NAN + 2j]), 1.0),
        (torch.tensor([1]), torch.tensor([2]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), float("inf")),
        ({"a": 1}, {"a": 1}, 0.0),
        ({"a": 1}, {"a": 2}, float("inf")),
        ([1], (1,), float("inf")),
    ],
)
def test_the_difference_of_results(expected: Any, got: Any, difference: float) -> None:
    """Relative to the largest value; NaN and infinities must coincide; integers and structure are exact."""
    assert largest_difference(expected, got)[0] == pytest.approx(difference)


def test_draws_from_a_generator_that_the_callable_holds_are_compared() -> None:
    """Both forms draw from the same state, another one in each call; afterwards it is as it was."""
    generator = torch.Generator().manual_seed(5)
    before, baked = generator.get_state(), torch.rand(4)

    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(4, generator=generator)

    alike = compare_calls(noisy, lambda x: noisy(x) * 1.0, (torch.ones(4),), [])
    assert alike.difference == 0.0
    assert torch.equal(generator.get_state(), before)
    assert not compare_calls(noisy, lambda x: x + baked, (torch.ones(4),), []).is_equal
