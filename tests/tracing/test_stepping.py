"""The optimizer's ops: as in a real steady step, or estimated with a note."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_run import differences, profile_step
from reference_models import image_loss, mlp, rows
from torch import nn, optim
from torch.optim import Optimizer

import ridgeline as rl
from ridgeline.optimizer_forms import takes_fused_form

Make = Callable[[nn.Module], Optimizer]
TRACED: dict[str, Make] = {
    "SGD": lambda m: optim.SGD(m.parameters(), 0.1),
    "SGD momentum": lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "SGD nesterov": lambda m: optim.SGD(m.parameters(), 0.1, 0.9, 0, 0.01, nesterov=True),
    "SGD foreach": lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=True),
    "Adam": lambda m: optim.Adam(m.parameters(), 0.1),
    "Adam amsgrad": lambda m: optim.Adam(m.parameters(), 0.1, amsgrad=True),
    "Adam foreach": lambda m: optim.Adam(m.parameters(), 0.1, foreach=True),
    "Adam fused": lambda m: optim.Adam(m.parameters(), 0.1, fused=True),
    "Adam tensor rate": lambda m: optim.Adam(m.parameters(), torch.tensor(0.1)),
    "AdamW": lambda m: optim.AdamW(m.parameters(), 0.1),
    "AdamW foreach": lambda m: optim.AdamW(m.parameters(), 0.1, foreach=True),
    "AdamW fused": lambda m: optim.AdamW(m.parameters(), 0.1, fused=True),
    "AdamW fused tensor rate": lambda m: optim.AdamW(m.parameters(), torch.tensor(0.1), fused=True),
    "RMSprop": lambda m: optim.RMSprop(m.parameters(), 0.1),
    "RAdam": lambda m: optim.RAdam(m.parameters(), 0.1),
    "NAdam": lambda m: optim.NAdam(m.parameters(), 0.1),
    "Adagrad": lambda m: optim.Adagrad(m.parameters(), 0.1),
    "groups": lambda m: optim.SGD(
        [{"params": m[0].parameters(), "momentum": 0.9}, {"params": m[2].parameters()}], 0.1
    ),
}


@pytest.mark.parametrize("case", TRACED)
def test_traced_as_in_a_steady_step(case: str) -> None:
    """The optimizer's ops are those of a real later step, although its state does not exist yet."""
    model = mlp()
    optimizer = TRACED[case](model)
    workload = rl.trace(model, image_loss, optimizer, rows)
    for _ in range(8 if case == "RAdam" else 2):  # RAdam takes six steps to become steady
        events = profile_step(model, image_loss, optimizer, rows)
    assert differences(events, workload.ops) == []
    assert workload.notes == ()
    assert rl.trace(model, image_loss, optimizer, rows).ops == workload.ops  # now with its state


@pytest.mark.parametrize(("case", "accesses"), [("SGD fused", 5), ("Adam fused", 7), ("SGD", 3)])
def test_least_traffic_of_an_update(case: str, accesses: int) -> None:
    """Momentum SGD moves 5 words for each parameter, Adam 7, plain SGD 3, besides step counters."""
    model = mlp()
    workload = rl.trace(model, image_loss, TRACED[case](model), rows)
    moved = sum(op.bytes_moved for op in workload.phase("optimizer"))
    counters = 3 * 4 * len(workload.parameters) if case == "Adam fused" else 0
    assert moved == accesses * sum(p.num_bytes for p in workload.parameters) + counters


@pytest.mark.parametrize(
    ("case", "fused"), [("SGD momentum", "SGD fused"), ("AdamW", "AdamW fused")]
)
def test_fused_traffic_is_that_of_the_fused_form(case: str, fused: str) -> None:
    """What the optimizer would move as one kernel is what tracing that kernel says, but for step counters."""
    model = mlp()
    plain = rl.trace(model, image_loss, TRACED[case](model), rows)
    as_fused = rl.trace(model, image_loss, TRACED[fused](model), rows)
    moved = sum(op.bytes_moved for op in as_fused.phase("optimizer"))
    counters = 4 * 4 * len(plain.parameters)
    assert abs(plain.fused_optimizer_bytes - moved) <= counters
    assert (
        plain.fused_optimizer_bytes
        < moved + counters
        < sum(op.bytes_moved for op in plain.phase("optimizer"))
    )


def test_the_form_of_a_twin_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU the traced twin loops over lists, which a user's optimizer could not leave for the fused form."""
    model = mlp()
    plain = rl.trace(model, image_loss, TRACED["AdamW"](model), rows)

    def settle(optimizer: Optimizer, twin: Optimizer) -> None:
        for group in twin.param_groups:
            group["foreach"] = True

    monkeypatch.setattr("ridgeline.tracing.fakes.twin._settle_foreach", settle)
    listed = rl.trace(model, image_loss, TRACED["AdamW"](model), rows)
    assert len(listed.phase("optimizer")) < len(plain.phase("optimizer"))
    assert listed.fused_optimizer_bytes == plain.fused_optimizer_bytes > 0


def test_an_optimizer_without_a_fused_form_moves_nothing_in_it() -> None:
    """RMSprop has none; Adam for doubles is captured in another form, which keeps the rate exact."""
    model = mlp()
    workload = rl.trace(model, image_loss, optim.RMSprop(model.parameters()), rows)
    assert workload.fused_optimizer_bytes == 0
    (group,) = optim.Adam(model.parameters()).param_groups
    assert takes_fused_form("Adam", group)
    (group,) = optim.Adam(model.double().parameters()).param_groups
    assert not takes_fused_form("Adam", group)


class Curious(Optimizer):
    """Looks at the values of gradients, which a trace does not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("memory", torch.zeros_like(parameter))
                if parameter.grad.norm() > 1:
                    parameter.data.add_(parameter.grad, alpha=-0.1)


def test_estimated_where_values_decide() -> None:
    """An optimizer that looks at values becomes one op a group, and a note says why."""
    model = mlp()
    workload = rl.trace(model, image_loss, Curious(model.parameters()), rows)
    (op,) = workload.phase("optimizer")
    assert op.name == "ridgeline.optimizer_step.Curious"
    first = model[0].weight.numel() * 4  # its memory exists by the time it asks
    total = sum(p.num_bytes for p in workload.parameters)
    assert op.bytes_read == 2 * total + first
    assert op.bytes_written == total + first
    assert workload.notes == (
        (
            "the optimizer Curious cannot be traced without data (it reads the value of a tensor); its "
            "step is estimated as one pass over parameters, gradients and state"
        ),
    )
    made = {
        index
        for index, earlier in enumerate(workload.phase("forward") + workload.phase("backward"))
        if earlier.family != "view" and any(spec.role == "gradient" for spec in earlier.outputs)
    }
    assert len(made) == 4
    assert made <= set(op.dependencies)


def test_estimated_where_a_closure_is_wanted() -> None:
    """LBFGS wants to call the loss itself: estimated, with a note."""
    model = mlp()
    workload = rl.trace(model, image_loss, optim.LBFGS(model.parameters()), rows)
    assert len(workload.phase("optimizer")) == 1
    assert "closure" in workload.notes[0]


def test_a_scheduler_does_not_step_the_real_optimizer() -> None:
    """A scheduler wraps `step` on the optimizer itself; the trace leaves that wrapper alone."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optim.lr_scheduler.StepLR(optimizer, 2)
    before = [p.clone() for p in model.parameters()]
    rl.trace(model, image_loss, optimizer, rows)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert not getattr(optimizer, "_opt_called", False)


class Doubled(optim.SGD):
    """A step of the user's own, with settings as torch's."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=2 * group["lr"])


@pytest.mark.parametrize(
    ("make", "is_outside"),
    [
        (TRACED["SGD"], False),
        (TRACED["AdamW"], False),
        (lambda m: Doubled(m.parameters(), 0.1), True),
        (lambda m: optim.Adafactor(m.parameters(), 0.1), True),
        (lambda m: optim.RMSprop(m.parameters(), 0.1, foreach=False), True),
    ],
)
def test_a_trace_says_which_optimizers_no_graph_can_hold(make: Make, is_outside: bool) -> None:
    """Neither one with a step of the user's own, nor one without a form for the device."""
    model = mlp()
    workload = rl.trace(model, image_loss, make(model), rows)
    assert workload.is_optimizer_outside is is_outside
