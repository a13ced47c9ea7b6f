"""What a captured program takes for granted of its process, compared by one function of `Guards`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook

from ridgeline.guards.guards import Guards

CHANGED = (
    "a setting that chooses kernels, a limit of Python's, a method of tensors, a logger's level, or hooks of "
    "all modules or on saved tensors changed"
)


def program(net: nn.Module, x: Tensor) -> Any:
    return net(x).sum()


@contextlib.contextmanager
def another_setting() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = not before
    try:
        yield
    finally:
        matmul.allow_fp16_accumulation = before


@contextlib.contextmanager
def hook_of_all_modules() -> Iterator[None]:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


def saving() -> contextlib.AbstractContextManager[Any]:
    """By graphs, which the compiler would take into a program."""
    hook = fx.symbolic_trace(lambda tensor: tensor * 2.0)
    return saved_tensors_hooks(hook, hook)


@pytest.mark.parametrize("change", [another_setting, hook_of_all_modules, saving])
def test_a_program_is_not_served_while_its_process_is_another(change: Any) -> None:
    """Nor are guards moved then; once it is as it was, they hold again."""
    arguments = {"net": nn.Linear(3, 2), "x": torch.ones(4, 3)}
    guards = Guards(program, arguments, ["x"])
    assert guards.holds(arguments)
    with change():
        assert not guards.holds(arguments)
        assert guards.difference(arguments) == CHANGED
        assert guards.moved(arguments) is None
    assert guards.holds(arguments)
    assert guards.moved(arguments) is not None


def test_hooks_on_saved_tensors_that_are_no_graphs_are_in_no_program() -> None:
    """Whoever captures backward passes looks for them himself."""
    arguments = {"net": nn.Linear(3, 2), "x": torch.ones(4, 3)}
    guards = Guards(program, arguments, ["x"])
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert guards.holds(arguments)


def test_guards_that_are_moved_watch_the_process_that_was_read() -> None:
    """Not what it is when they are moved."""
    arguments = {"net": nn.Linear(3, 2), "x": torch.ones(4, 3)}
    guards = Guards(program, arguments, ["x"])
    arguments["net"].weight.data = arguments["net"].weight.data.clone()
    moved = guards.moved(arguments)
    assert moved is not None
    assert moved.holds(arguments)
    with saving():
        assert not moved.holds(arguments)
