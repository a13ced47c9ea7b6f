"""Functions that keep their results: what they kept is what every form of a program goes on with."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import RidgelineError
from ridgeline.guards.reading import UnreadableError, read_program
from ridgeline.plan import Plan
from ridgeline.programs.watches.added import with_guards
from ridgeline.programs.watches.left_to_python import is_pure
from ridgeline.runtime.steps.step import PlannedStep

FACTOR = [1.0]


@functools.cache
def _scale(n: int) -> float:
    return FACTOR[0] * n


@functools.lru_cache(maxsize=2)
def _table(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


@functools.cache
def _listed(n: int) -> list[int]:
    return [n]


@functools.cache
def _root(n: int, by: float = 2.0) -> float:
    return math.sqrt(max(n, 1)) * by


@functools.cache
def _of_a_tensor(x: Tensor) -> Tensor:
    return x * 2


def _held(n: int, held: list[int] = [2]) -> int:  # noqa: B006 - what is refused
    return n * len(held)


def _by_the_scale(x: Tensor) -> Tensor:
    return x * _scale(4)


def _and_the_table(x: Tensor) -> Tensor:
    return x + _table(4)


def _by_the_list(x: Tensor) -> Tensor:
    return x * sum(_listed(4))


def _twice(x: Tensor) -> Tensor:
    return -_of_a_tensor(x)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Caches are empty before, and the compiler knows nothing."""
    from torch._inductor import config

    for cached in (_scale, _table, _listed, _root, _of_a_tensor):
        cached.cache_clear()
    FACTOR[0] = 1.0
    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield


def _doubled() -> None:
    FACTOR[0] = 2.0


def _doubled_and_forgotten() -> None:
    FACTOR[0] = 2.0
    _scale.cache_clear()


Read = Callable[[Tensor], Tensor]
CASES: dict[str, tuple[Read, Callable[[], Any]]] = {
    "a global that it reads changes": (_by_the_scale, _doubled),
    "it is emptied": (_by_the_scale, _doubled_and_forgotten),
    "a tensor that it keeps changes": (_and_the_table, lambda: _table(4).mul_(2)),
    "a list that it keeps changes": (_by_the_list, lambda: _listed(4).append(3)),
}
cases = pytest.mark.parametrize("name", CASES)


class Net(nn.Module):
    """Reads one of them."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        """Of a linear layer."""
        return self.read(self.linear(x))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@cases
@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_compiled_steps_go_on_with_what_was_kept(name: str, execution: Any) -> None:
    """Before and after a change, their loss is that of the step as written."""
    read, change = CASES[name]
    model, x = nn.Sequential(Net(read), Net(read)), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with PlannedStep(model, _loss, optimizer, Plan(execution=execution)) as step:
        for act in (lambda: None, lambda: None, change, lambda: None):
            act()
            wanted = float(_loss(model, x))
            assert float(step(x)) == pytest.approx(wanted, rel=1e-5)


@cases
@pytest.mark.parametrize("mode", ["script", "compiled"])
def test_calls_go_on_with_what_was_kept_or_are_refused(name: str, mode: Any) -> None:
    """A script, which has no place for a cache, says so."""
    read, change = CASES[name]
    model, x = Net(read), torch.randn(2, 4)
    if mode == "script":
        with pytest.raises(RidgelineError, match="keeps its results in a cache"):
            hybridize(model, x, mode=mode)
        return
    call = hybridize(model, x, mode=mode)
    for act in (lambda: None, change):
        act()
        torch.testing.assert_close(call(x), model(x).detach())


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (_by_the_scale, "_scale"),
        (_and_the_table, "_table"),
        (_by_the_list, "_listed"),
        (_twice, "_of_a_tensor"),
    ],
)
def test_a_program_in_one_piece_is_refused(read: Read, name: str) -> None:
    """By name, with the line."""
    line = read.__code__.co_firstlineno + 1

    def program(read: Any, x: Any) -> Any:
        return read(x)

    with pytest.raises(UnreadableError) as caught:
        read_program(program, {"read": read, "x": torch.ones(4)})
    assert str(caught.value) == (
        "wanted a program that torch's compiler can read in one piece, got a call of "
        f"{name}, which keeps its results in a cache of Python's, where a captured program does not look; call "
        f"it outside and pass what it gives, or take the cache away (test_cached_functions.py:{line} in {read.__name__})"
    )


def test_a_cache_that_changes_no_result_is_read() -> None:
    """The function computes with numbers alone."""

    def program(x: Any) -> Any:
        return x * _root(4)

    assert "4.0" in read_program(program, {"x": torch.ones(4)}).graph


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (_root, True),
        (_scale, False),
        (_table, False),
        (_held, False),
        (len, False),
    ],
)
def test_what_is_pure(function: Any, wanted: bool) -> None:
    """No global besides `math`, no closure, no default that can change."""
    assert is_pure(getattr(function, "__wrapped__", function)) is wanted


def test_what_others_compile_is_as_before() -> None:
    """Their programs look through caches, as torch has it."""
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    def program(x: Tensor) -> Tensor:
        return x * _scale(4)

    with_guards(backend)
    run = torch.compile(program, backend=backend, fullgraph=True)
    assert torch.equal(run(torch.ones(4)), torch.full((4,), 4.0))
    assert len(compiled) == 1
