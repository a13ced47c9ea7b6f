"""Recording a real step: the same operators as without running it, nothing left behind, or one op a phase."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from reference_models import image_batch, image_loss, mlp, resnet, rows, sgd
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.errors import WorkloadError
from ridgeline.machine import Setting
from ridgeline.reach.loss import scalar_loss
from ridgeline.tracing.opaque import opaque_timings
from ridgeline.tracing.recorded_step import Step
from ridgeline.tracing.refusal import obstacle
from ridgeline.tracing.running import real_workload
from ridgeline.workload import Workload
from strategies import make_machine


def norm_and_dropout() -> tuple[Any, ...]:
    model = nn.Sequential(
        resnet((1,), bottleneck=False, width=4, classes=10), nn.Dropout(), nn.Linear(10, 10)
    )
    return model, image_loss, sgd(model), image_batch(4, side=16)


def shared_weights() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Linear(6, 10))
    model[2].weight = model[0].weight
    return model, image_loss, torch.optim.AdamW(model.parameters()), rows


def attention() -> tuple[Any, ...]:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.RAdam(model.parameters())
    return model, lambda m, b: m(b).square().mean(), optimizer, torch.randn(3, 5, 8)


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "norm and dropout": norm_and_dropout,
    "shared weights": shared_weights,
    "attention": attention,
}


def without_dependencies(workload: Workload) -> list[Any]:
    return [msgspec.structs.replace(op, dependencies=()) for op in workload.ops]


# Of a norm in bf16, whose statistics are single on a CPU, fake tensors say that they are bf16.
@pytest.mark.parametrize(
    ("case", "precision"),
    [*((case, "as-is") for case in CASES), ("shared weights", "bf16"), ("attention", "bf16")],
)
def test_running_shows_what_tracing_shows(case: str, precision: Any) -> None:
    """Operators, costs, modules, roles, ready order, and when each storage is made and dies."""
    model, loss_fn, optimizer, batch = CASES[case]()
    traced = rl.trace(model, loss_fn, optimizer, batch, precisions=("bf16",)).at(precision)
    step = Step(model, loss_fn, optimizer, batch, precision)
    recorded = real_workload(step, "model", "it was asked for")
    assert without_dependencies(recorded) == without_dependencies(traced)
    assert recorded.memory == traced.memory
    assert recorded.ready_order == traced.ready_order
    assert recorded.parameters == traced.parameters
    assert recorded.precision == precision
    assert recorded.notes == ("recorded from a real step, which was taken back: it was asked for",)


class Choosing(nn.Module):
    """Routes rows by sign, counts its calls, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 10), nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.calls = 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        (chosen,) = (x[:, 0] > 0).nonzero(as_tuple=True)
        self.seen.append(x)
        self.last = x
        return self.norm(self.right(x).index_add(0, chosen, self.left(x[chosen])))


def choosing_loss(model: nn.Module, batch: Any) -> Tensor:
    random.random()
    np.random.rand()
    torch.rand(1)
    return image_loss(model, batch)


def test_a_step_that_chooses_is_refused_unless_it_may_run() -> None:
    """The refusal names the way out, and the way out leads out."""
    model = Choosing()
    line = Choosing.forward.__code__.co_firstlineno + 2
    arguments = (model, choosing_loss, sgd(model), rows)
    with pytest.raises(WorkloadError, match="or trace with may_run=True, which records a real"):
        rl.trace(*arguments)
    workload = rl.trace(*arguments, may_run=True, precisions=("bf16",))
    note = (
        "recorded from a real step, which was taken back: aten.nonzero.default in loss_fn "
        f"(test_running.py:{line}) during forward (wanted a step whose shapes do not depend on the values of "
        "tensors)"
    )
    assert workload.notes == (note,)
    assert workload.at("bf16").notes == (note,)
    assert {"nonzero", "index_add"} <= {op.name.split(".")[1] for op in workload.phase("forward")}
    assert {op.dtype for op in workload.at("bf16").ops if op.family == "matmul"} == {"bfloat16"}
    assert rl.simulate(make_machine(), workload, rl.Plan(threads=2)).step_ns > 0


def test_a_precision_in_which_a_step_fails_is_noted() -> None:
    """The step itself is described all the same."""

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        (chosen,) = (b[0][:, 0] < 9).nonzero(as_tuple=True)
        return torch.zeros(8, 4).index_add(0, chosen, m(b[0])).square().mean()  # types must agree

    model = mlp()
    line = loss_fn.__code__.co_firstlineno + 2
    workload = rl.trace(model, loss_fn, sgd(model), rows, precisions=("bf16",), may_run=True)
    assert workload.variants == ()
    recorded, failed = workload.notes
    assert recorded.startswith("recorded from a real step")
    assert failed.startswith("the step does not run in bf16: RuntimeError: index_add_()")
    assert failed.endswith(f"(test_running.py:{line})")
    assert len(workload.ops) > 30


def test_what_ran_is_taken_back() -> None:
    """Values, identities, gradients, hooks, counters, lists and random states are as before."""
    model = Choosing()
    optimizer = torch.optim.Adam(model.parameters())
    model.left.weight.grad = torch.ones(10, 6)
    gradient = model.left.weight.grad
    values = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    states = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    rl.trace(model, choosing_loss, optimizer, rows, may_run=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
        assert value.data_ptr() == places[name]
    assert model.left.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(10, 6))
    assert model.right.weight.grad is None
    assert (model.calls, model.seen, hasattr(model, "last")) == (0, [], False)
    assert not optimizer.state
    assert not model._forward_hooks
    assert not model.left._forward_pre_hooks
    assert not model.left.weight._post_accumulate_grad_hooks
    assert states == (
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
    )


class Watchful(nn.Module):
    """Will not run where a recorder could see it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("not under a mode")
        return self.body(x)


def test_what_cannot_be_recorded_is_one_op_a_phase() -> None:
    """With the seconds that the phases took, so that a machine that knows them predicts their sum."""
    model = Watchful()
    line = Watchful.forward.__code__.co_firstlineno + 2
    workload = rl.trace(model, image_loss, sgd(model), rows, may_run=True)
    names = [f"ridgeline.opaque.{phase}" for phase in ("forward", "backward", "optimizer")]
    assert [op.name for op in workload.ops] == names
    assert [op.phase for op in workload.ops] == ["forward", "backward", "optimizer"]
    assert [op.dependencies for op in workload.ops] == [(), (0,), (1,)]
    assert workload.ready_order == rl.trace(*plain_step()).ready_order
    assert {p.ready_op for p in workload.parameters} == {1}
    why = f"RuntimeError: not under a mode (test_running.py:{line})"
    note = "each phase counts as one operator, as long as the phase took, and activations are not counted"
    assert workload.notes == (f"{note}: {why}; and of a real step: {why}",)
    setting = Setting(device="cpu", workers=1, threads=2)
    timings = opaque_timings(workload, setting)
    assert [timing.key for timing in timings] == [op.key for op in workload.ops]
    machine = msgspec.structs.replace(make_machine(), timings=timings)
    predicted = rl.simulate(machine, workload, rl.Plan(threads=2)).step_ns
    assert predicted == pytest.approx(1e9 * sum(t.seconds.value for t in timings), rel=1e-3)
    assert opaque_timings(rl.trace(*plain_step()), setting) == ()


def test_a_step_that_no_recorder_sees_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is the step as it trains: each update finds gradients of the norm that was asked for."""
    norms: list[float] = []

    def step(self: torch.optim.SGD) -> None:
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        norms.append(float(nn.utils.get_total_norm(gradients)))

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    model = Watchful()
    workload = rl.trace(model, image_loss, sgd(model), rows, may_run=True, clip_norm=1e-3)
    assert [op.name for op in workload.ops][-1] == "ridgeline.opaque.optimizer"
    assert norms == pytest.approx([1e-3] * len(norms), rel=1e-2)


def plain_step() -> tuple[Any, ...]:
    model = nn.Sequential()
    model.body = mlp()
    return model, image_loss, sgd(model), rows


def test_errors_of_a_step_that_ran_are_its_own() -> None:
    """What a plain loop would raise is raised, not wrapped, and leaves the model as it was."""
    model = Choosing()
    before = model.norm.running_mean.clone()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        rl.trace(model, image_loss, sgd(model), (torch.zeros(8, 7), rows[1]), may_run=True)
    with pytest.raises(WorkloadError, match="wanted a scalar loss tensor, got shape"):
        rl.trace(model, lambda m, b: m(b[0]), sgd(model), rows, may_run=True)
    assert torch.equal(model.norm.running_mean, before)
    assert model.calls == 0


def test_the_line_that_is_named_is_the_users() -> None:
    """Code of this package outside of the tracer counted as the user's."""
    with pytest.raises(WorkloadError) as caught:
        scalar_loss(None)
    assert obstacle(ValueError("no").with_traceback(caught.tb)).startswith(
        "ValueError: no (test_running.py:"
    )
