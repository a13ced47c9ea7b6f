"""Hooks of all modules: what they do to the user's modules counts, and nothing else is a module of the user's."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as registry

from adversary.interpreting import interpreted
from ridgeline.plan import Execution, Plan
from ridgeline.programs.inductor import by_operators, compile_plain
from ridgeline.programs.watches.added import with_guards
from ridgeline.programs.watches.hooks_of_all import hooks_of_all_modules, no_hooks_of_all_modules
from ridgeline.runtime.steps.step import PlannedStep

# Of torch's compiler itself, where it reads a hook of a tensor (2.11).
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.usefixtures("compiler_begins_anew"),
]

HOOKS: dict[str, Callable[[], Any]] = {
    "forward": lambda: registry.register_module_forward_hook(lambda _, __, out: out * 1.5),
    "forward, always": lambda: registry.register_module_forward_hook(
        lambda _, __, out: out + 0.5, always_call=True
    ),
    "before forward": lambda: registry.register_module_forward_pre_hook(
        lambda _, args: (args[0] - 0.25,)
    ),
    "backward": lambda: registry.register_module_full_backward_hook(
        lambda _, gradients, __: tuple(g if g is None else g * 2 for g in gradients)
    ),
}


@contextlib.contextmanager
def hooked(kind: str) -> Iterator[None]:
    """A hook of that kind inside."""
    handle = HOOKS[kind]()
    try:
        yield
    finally:
        handle.remove()


class Block(nn.Module):
    """A layer and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The activation, with a hook of its own."""
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Depends on every weight."""
    return (model(x) - 0.5).square().mean()


def trained(execution: Execution, kind: str) -> list[Tensor]:
    """Losses and then parameters of six steps, three of them with a hook."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 2))
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, loss_fn, optimizer, Plan(execution=execution)) as step:
        for has_hook in (False, True, True, False, True, False):
            with hooked(kind) if has_hook else contextlib.nullcontext():
                losses.append(step(torch.randn(3, 4)))
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("execution", ["compiled", "regional"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
def test_steps_follow_them(execution: Execution, kind: str) -> None:
    """Put and taken away between steps, they change what a compiled step computes as they change the eager one."""
    with interpreted():
        torch.testing.assert_close(trained(execution, kind), trained("eager", kind))


def test_what_the_compiler_makes_calls_none() -> None:
    """With its code, too: forward and backward are compiled while there is a hook."""
    torch.testing.assert_close(trained("compiled", "forward"), trained("eager", "forward"))


def test_a_hook_that_comes_or_goes_compiles_anew() -> None:
    """And only that: a second call with the same hook is served by what the first one compiled."""
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return by_operators(graph)

    model, x = Block(), torch.randn(3, 4)
    run: Any = torch.compile(model.forward, backend=with_guards(backend))
    torch.testing.assert_close(run(x), model.forward(x))
    for number in (2, 3):
        with hooked("forward"):  # another one each time
            for _ in range(2):
                torch.testing.assert_close(run(x), model.forward(x))
                assert len(compiled) == number
        torch.testing.assert_close(run(x), model.forward(x))
        assert len(compiled) == number


@pytest.mark.parametrize("runs", [by_operators, lambda graph: compile_plain(graph, [_noted()])])
@pytest.mark.filterwarnings("ignore:what reads tensors whose sign")
def test_a_graph_by_operators_is_no_module(runs: Callable[[fx.GraphModule], Any]) -> None:
    """Its code is made when it is first called, or before."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        made = fx.symbolic_trace(lambda x: (x * 2,))
        lazy = _make_graph_module(made, made.graph)
    lazy.recompile()
    run, x = runs(lazy), _noted()
    with hooked("forward"):  # which would repeat the tuple
        for _ in range(2):
            assert torch.equal(run(x)[0], x * 2)
            assert len(run(x)) == 1


def _noted() -> Tensor:
    return torch.tensor([1j, 2.0, 3j]).conj().imag


def test_none_inside_and_the_same_in_order_afterwards() -> None:
    """Also where something fails inside."""
    assert hooks_of_all_modules() == ()
    with hooked("forward"), hooked("backward"), hooked("forward, always"):
        before = hooks_of_all_modules()
        assert sum(map(len, before)) == 3
        with contextlib.suppress(ZeroDivisionError), no_hooks_of_all_modules():
            assert hooks_of_all_modules() == ()
            raise ZeroDivisionError
        assert hooks_of_all_modules() == before
    assert hooks_of_all_modules() == ()
