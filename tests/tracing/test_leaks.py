"""Fake tensors that outlive a trace are found; those that are about to go are waited for."""

import functools
import gc

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ridgeline as rl
from ridgeline.tracing.fakes import leaks


@pytest.mark.parametrize(("device", "waits"), [("cuda", 2), ("cpu", 0)])
def test_a_thread_of_a_gpu_may_let_go_late(
    device: str, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has let go after the second pause, nothing is left; on a CPU there is no such thread."""
    mode, pauses = FakeTensorMode(), []
    with mode:
        held = [torch.empty(2, device=device)]

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            held.clear()

    monkeypatch.setattr(leaks.time, "sleep", pause)
    assert len(leaks.left_fakes(mode)) == len(held) == (0 if waits else 1)
    assert pauses == [*leaks.PAUSES_S[:waits]]


def test_what_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all pauses."""
    monkeypatch.setattr(leaks.time, "sleep", lambda _: None)
    mode = FakeTensorMode()
    with mode:
        held = torch.empty(2, device="cuda")
    assert [one is held for one in leaks.left_fakes(mode)] == [True]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_objects_are_set_aside_for_the_time_of_a_trace(is_frozen: bool) -> None:
    """Of those that are there none is looked at, unless the program has set aside some itself."""
    older = [object(), []]
    if is_frozen:
        gc.freeze()
    count = gc.get_freeze_count()
    try:
        with leaks.older_objects_set_aside():
            newer = [older]
            seen = {id(found) for found in gc.get_objects()}
            assert id(newer) in seen
            assert id(older) not in seen
            assert gc.get_freeze_count() >= count
        # Those that Python 3.12 sets aside when it starts come back with the others.
        assert gc.get_freeze_count() == (count if is_frozen else 0)
    finally:
        gc.unfreeze()
    assert any(found is older for found in gc.get_objects())


def test_what_an_object_holds_is_in_reach() -> None:
    """Or what is the gradient of a real tensor, which torch's own memory holds."""
    mode = FakeTensorMode()
    with mode:
        held = {"table": torch.empty(2)}
    assert not leaks.are_out_of_reach(leaks.left_fakes(mode))
    real = nn.Parameter(torch.ones(2))
    with mode:
        real.grad = held.pop("table")
    assert not leaks.are_out_of_reach(leaks.left_fakes(mode))
    real.grad = None
    assert leaks.left_fakes(mode) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_what_torch_loses_ends_no_trace() -> None:
    """A Hessian of each sample cannot be traced, and leaves tensors in torch's memory that nobody finds."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def laplacian(model: nn.Module, x: Tensor) -> Tensor:
        hessian = torch.func.hessian(lambda row: model(row).sum())
        return torch.vmap(hessian)(x).diagonal(dim1=1, dim2=2).sum(1).square().mean()

    workload = rl.trace(model, laplacian, _sgd(model), torch.randn(3, 4), may_run=True)
    assert any("recorded from a real step" in note for note in workload.notes)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_recorder_that_cannot_follow_a_parameter_lets_go_of_all() -> None:
    """A TorchScript module is copied with real parameters that somebody computed: no hook takes these."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.scripted = torch.jit.script(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.scripted(self.first(x))

    model = Net()
    workload = rl.trace(model, _loss, _sgd(model), torch.randn(3, 4), may_run=True)
    assert any("recorded from a real step" in note for note in workload.notes)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def test_a_cache_that_the_program_has_set_aside_is_emptied() -> None:
    """Who holds a fake tensor is looked for among objects that garbage collections leave out, too."""

    @functools.cache
    def table(size: int) -> torch.Tensor:
        return torch.ones(size)

    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * table(2)).sum()

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gc.collect()
    gc.freeze()
    try:
        rl.trace(model, loss_fn, optimizer, torch.ones(4, 3))
        assert gc.get_freeze_count() > leaks.AT_START
    finally:
        gc.unfreeze()
    assert type(table(2)) is torch.Tensor
