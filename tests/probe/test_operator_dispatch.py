"""Host seconds of a call by class: its record, its backward, and what is kept of them in a profile."""

from typing import Any, get_args

import msgspec
import pytest
import torch
from answered_requests import answered
from torch import Tensor

from ridgeline.errors import LaunchError
from ridgeline.machine import Machine, Setting
from ridgeline.machine.operator_dispatch import OperatorClass, OperatorDispatch
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.rates import operator_dispatch
from ridgeline.probe.rates.operator_dispatch import (
    LONG,
    CallSeconds,
    SmallCall,
    in_worker,
    seconds_of,
    small_calls,
    with_operator_dispatch,
)
from strategies import make_machine

CPU = torch.device("cpu")


class Ticking:
    """A clock that only calls move: 3 s without a record, 5 s with one, 7 s of backward, 100 s to begin it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def call(self, *, has_gradient: bool = True) -> SmallCall:
        clock = self

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return 2.0 * x

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
                clock.now += 7.0
                return 2.0 * gradient

        def twice(x: Tensor) -> Tensor:
            clock.now += 5.0 if torch.is_grad_enabled() else 3.0
            return Twice.apply(x)

        def begin(gradient: Tensor) -> None:
            clock.now += 100.0

        start = torch.zeros(1, requires_grad=has_gradient)
        if has_gradient:
            start.register_hook(begin)
        return SmallCall("elementwise", "twice", twice, start, [()] * LONG, has_gradient)


def entry(device: str = "cpu") -> OperatorDispatch:
    return OperatorDispatch(
        device=device,  # type: ignore[arg-type]
        kind="copy",
        call="clone",
        plain=Sampled.measured([1.0, 3.0, 2.0], "s"),
        recorded=Sampled.measured([2.0, 2.0, 5.0], "s"),
        backward=Sampled.measured([2.0, 6.0, 15.0], "s"),
    )


def test_a_chain_is_divided_by_its_calls_and_backward_loses_its_start() -> None:
    """Whatever a backward costs beside its calls is in none of the three figures."""
    clock = Ticking()
    assert seconds_of(clock.call(), clock) == CallSeconds(3.0, 5.0, 7.0)
    assert seconds_of(clock.call(has_gradient=False), clock) == CallSeconds(3.0, 0.0, 0.0)


def test_every_class_has_a_call_whose_chain_keeps_its_shape_and_whose_gradients_arrive() -> None:
    """Each call of the chain uses weights of its own, and all of them get gradients."""
    calls = small_calls(CPU)
    assert [call.kind for call in calls] == list(get_args(OperatorClass))
    for call in calls:
        assert len(call.weights) == LONG
        x = call.start
        for weights in call.weights:
            after = call.function(x, *weights)
            assert after.numel() in (
                x.numel(),
                8,
            )  # a sum of rows leaves one, from the first call on
            x = after
        assert x.requires_grad == call.has_gradient
        if call.has_gradient:
            x.backward(torch.ones_like(x))
            leaves = [call.start, *(weight for weights in call.weights for weight in weights)]
            assert all(leaf.grad is not None for leaf in leaves)


def test_what_the_record_adds_and_the_share_of_backward_follow_from_the_samples() -> None:
    """Round by round; a record that took less than none adds nothing."""
    known = entry()
    assert known.recording == Sampled.measured([1.0, 0.0, 3.0], "s")
    assert known.backward_share == Sampled.measured([0.5, 0.75, 0.75], "")
    alone = msgspec.structs.replace(known, recorded=None, backward=None)
    assert (alone.recording, alone.backward_share) == (None, None)


def test_every_class_is_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker does it; only the optimizer's call has no backward."""
    monkeypatch.setattr(operator_dispatch, "ROUNDS", 3)
    monkeypatch.setattr(operator_dispatch, "LEAST_S", 0.0)
    found = msgspec.json.decode(in_worker(b"cpu"), type=tuple[OperatorDispatch, ...])
    assert [one.kind for one in found] == list(get_args(OperatorClass))
    assert {one.device for one in found} == {"cpu"}
    assert all(one.plain.n == len(one.plain.samples) == 3 for one in found)
    assert all(min(one.plain.samples) > 0.0 for one in found)
    assert [one.kind for one in found if one.recorded is None] == ["optimizer"]
    assert all((one.recorded is None) == (one.backward is None) for one in found)


DISPATCH = "rates.operator_dispatch"


def one_entry(request: bytes) -> bytes:
    """The reply of a process, whatever it is asked for."""
    return msgspec.json.encode((entry(),))


def test_a_profile_gets_what_it_lacks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of one thread; of another device it keeps what it has."""
    asked = answered(monkeypatch, DISPATCH, one_entry)
    kept: list[Machine] = []
    said: list[str] = []
    machine = msgspec.structs.replace(make_machine(), operator_dispatch=(entry("cuda"),))

    def keep(one: Machine) -> Machine:
        kept.append(one)
        return one

    found = with_operator_dispatch(machine, keep, said.append)
    assert found.operator_dispatch == (entry("cuda"), entry())
    assert kept == [found]
    assert with_operator_dispatch(found, keep, said.append) == found
    assert said == ["dispatch: classes of operators on cpu"]
    assert asked == [(b"cpu", Setting(device="cpu", threads=1))]


def test_a_process_that_fails_costs_the_figures_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried again the next time, and then its warning is gone."""

    def fails(request: bytes) -> bytes:
        raise LaunchError("wanted one GPU per worker, got none")

    machine = make_machine()
    answered(monkeypatch, DISPATCH, fails)
    found = with_operator_dispatch(machine, lambda one: one, print)
    assert found.operator_dispatch == ()
    assert found.warnings == (
        *machine.warnings,
        "no dispatch by class of operator: wanted one GPU per worker, got none",
    )
    answered(monkeypatch, DISPATCH, one_entry)
    again = with_operator_dispatch(found, lambda one: one, print)
    assert (again.operator_dispatch, again.warnings) == ((entry(),), machine.warnings)
