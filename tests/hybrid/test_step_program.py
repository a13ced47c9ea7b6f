"""A training step as one program: the maths of the eager step, for every optimizer and every setting."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError, PlanError
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.whole_step.program import StepProgram, trace_body, trace_step

WEIGHTS = torch.linspace(0.5, 1.5, 4)
SILENT = Recorder(HostClock())


class Net(nn.Module):
    """Batch norm, dropout, tied weights, a frozen layer and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.middle = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.middle.weight
        self.frozen = nn.Linear(8, 4).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.single = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(0.5))})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        hidden = self.drop(torch.relu(self.middle(hidden)))
        return self.frozen(self.tied(hidden)) * self.single.scale.exp()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    weights = WEIGHTS.to(batch["x"].dtype)
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], weight=weights)


def batch_of(index: int, size: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 6, generator=generator)
    return {"x": x, "y": torch.randint(0, 4, (size,), generator=generator)}


def two_groups(kind: Any, **settings: Any) -> Any:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return kind([{"params": [first]}, {"params": rest, "lr": 0.02}], lr=0.01, **settings)

    return make


OPTIMIZERS = {
    "sgd": two_groups(torch.optim.SGD),
    "momentum": two_groups(torch.optim.SGD, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": two_groups(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": two_groups(torch.optim.SGD, momentum=0.9, fused=True),
    "adam": two_groups(torch.optim.Adam, weight_decay=0.01, amsgrad=True),
    "adam foreach": two_groups(torch.optim.Adam, foreach=True),
    "adam fused": two_groups(torch.optim.Adam, fused=True),
    "adamw": two_groups(torch.optim.AdamW),
    "adamw maximize": two_groups(torch.optim.AdamW, maximize=True),
    "nadam": two_groups(torch.optim.NAdam),
    "rmsprop": two_groups(torch.optim.RMSprop, momentum=0.5, eps=1e-3),
    "adagrad": two_groups(torch.optim.Adagrad),
}


def body_of(make: Any, plan: Plan, clip_norm: float | None) -> StepBody:
    torch.manual_seed(0)
    model = Net()
    return StepBody(
        model, loss_fn, make(model), plan, None, clip_norm=clip_norm, device=torch.device("cpu")
    )


def trained(body: StepBody) -> list[Tensor]:
    tensors = [*body.model.parameters(), *body.model.buffers()]
    state = [v for s in body.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [tensor.detach() for tensor in (*tensors, *state)]


PLAIN, FULL = (1, None), (3, 0.5)
"""Micro-batches and clipping norm."""


@pytest.mark.parametrize(
    ("name", "accumulate", "clip_norm"),
    [
        *((name, *(FULL, PLAIN)[index % 2]) for index, name in enumerate(OPTIMIZERS)),
        *(("sgd", *PLAIN), ("momentum", *FULL), ("adam", *PLAIN), ("adamw", *PLAIN)),
    ],
)
def test_the_program_equals_the_eager_step(
    name: str, accumulate: int, clip_norm: float | None
) -> None:
    """Losses, parameters, running statistics, step counts: equal while a scheduler moves learning rates."""
    # Of a last bit, in which sums by other threads differ, RMSprop makes 10,000 times as much.
    plan = Plan(accumulate=accumulate)
    batches = [{"x": one["x"].double(), "y": one["y"]} for one in map(batch_of, range(6))]
    eager, traced = (body_of(OPTIMIZERS[name], plan, clip_norm) for _ in range(2))
    for body in (eager, traced):
        body.model.double()
        torch.manual_seed(0)
        body(batches[0], SILENT)
    program = trace_body(traced, batches[0])
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(b.optimizer, 0.8) for b in (eager, traced)]
    for index in range(1, 6):
        torch.manual_seed(index)
        wanted = eager(batches[index], SILENT)
        torch.manual_seed(index)
        program.lifted.rates.refresh()
        loss = program.run(list(batches[index].values()))
        torch.testing.assert_close(loss, wanted, rtol=1e-8, atol=1e-8)
        for body, scheduler in zip((eager, traced), schedulers, strict=True):
            body.optimizer._opt_called = True
            scheduler.step()
    for mine, theirs in zip(trained(traced), trained(eager), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def traced_step(
    make: Any = OPTIMIZERS["adam"], loss: Any = loss_fn
) -> tuple[nn.Module, Any, StepProgram]:
    """A model after one eager step, its optimizer and its program."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    loss(model, batch_of(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, trace_step(model, loss, optimizer, batch_of(0))


@pytest.mark.parametrize("of", ["conv", "rnn"])
def test_precisions_of_cudnn_by_their_newer_names_stand_in_no_traces_way(of: str) -> None:
    """Torch refuses to say by its older names what they are; afterwards all flags are as before."""
    cudnn: Any = torch.backends.cudnn
    kind = getattr(cudnn, of)
    before = kind.fp32_precision
    try:
        kind.fp32_precision = "ieee"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            assert cudnn.allow_tf32
        flags = (cudnn.enabled, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
        _, _, program = traced_step()
        assert len(program.graph.graph.nodes) > 10
        assert flags == (cudnn.enabled, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    finally:
        kind.fp32_precision = before


def test_tracing_changes_nothing() -> None:
    """Parameters, buffers, gradients, optimizer (settings too) and random state are as before."""
    model, optimizer, _ = traced_step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    keys, groups = list(optimizer.state), optimizer.param_groups
    random = torch.get_rng_state()
    trace_step(model, loss_fn, optimizer, batch_of(1), clip_norm=1.0, accumulate=2)
    after = (model.state_dict(), optimizer.state_dict())
    assert all(
        torch.equal(x, y) for x, y in zip(before[0].values(), after[0].values(), strict=True)
    )
    assert str(before[1]) == str(after[1])
    assert all(a is b for a, b in zip(keys, optimizer.state, strict=True))
    assert optimizer.param_groups is groups
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_state_is_named_and_shared() -> None:
    """Tied weights are listed once; every entry is the model's or the optimizer's own memory."""
    model, _, program = traced_step()
    names = [entry.name for entry in program.state]
    assert "middle.weight" in names
    assert "tied.weight" not in names
    assert program.lifted.aliases() == {"tied.weight": "middle.weight"}
    assert {"norm.num_batches_tracked", "first.weight/step", "group/1/lr", "constant/0"} < set(
        names
    )
    by_name = dict(zip(names, program.state, strict=True))
    assert (
        by_name["first.weight"].tensor.data_ptr() == model.get_parameter("first.weight").data_ptr()
    )
    assert repr(program) == f"StepProgram({count(program)} operators, {len(names)} state tensors)"


def count(program: StepProgram) -> int:
    return sum(node.op == "call_function" for node in program.graph.graph.nodes)


def test_dropout_never_repeats_its_mask() -> None:
    """The same batch with learning rate 0 gives another loss each time."""
    _, optimizer, program = traced_step(two_groups(torch.optim.SGD))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    program.lifted.rates.refresh()
    losses = {float(program.run(program.inputs)) for _ in range(6)}
    assert len(losses) == 6


@pytest.mark.parametrize("as_tensor", [False, True])
def test_learning_rates_are_read_from_the_optimizer(as_tensor: bool) -> None:
    """A rate of 0 freezes its group and no other, whether it is assigned as a number or as a tensor."""
    model, optimizer, program = traced_step(two_groups(torch.optim.SGD))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0) if as_tensor else 0.0
    program.lifted.rates.refresh()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    program.run(program.inputs)
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same == {
        "first.weight", "frozen.weight", "frozen.bias", "unused.weight", "unused.bias"
    }  # fmt: skip


def test_tensors_that_the_loss_brings_along_are_inputs() -> None:
    """Class weights changed in place are seen by the next step."""
    _, _, program = traced_step(two_groups(torch.optim.SGD))
    model = program.lifted.model.eval()
    before = trace_step(model, loss_fn, program.lifted.optimizer, batch_of(0))
    first = before.run(before.inputs)
    WEIGHTS.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    try:
        wanted = loss_fn(model, batch_of(0)).detach()
        assert not torch.isclose(first, wanted)
        torch.testing.assert_close(before.run(before.inputs), wanted)
    finally:
        WEIGHTS.copy_(torch.linspace(0.5, 1.5, 4))


def test_16_bit_autocast_is_part_of_the_program() -> None:
    """precision='bf16' gives the losses of the eager step under autocast."""
    eager, traced = (body_of(OPTIMIZERS["adamw"], Plan(precision="bf16"), None) for _ in range(2))
    for body in (eager, traced):
        torch.manual_seed(0)
        body(batch_of(0), SILENT)
    program = trace_body(traced, batch_of(0))
    for index in range(1, 4):
        torch.manual_seed(index)
        wanted = eager(batch_of(index), SILENT)
        torch.manual_seed(index)
        loss = program.run(list(batch_of(index).values()))
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)


def test_optimizer_state_that_is_loaded_is_taken_over() -> None:
    """load_state_dict makes new tensors, which then lie where the program writes."""
    _, optimizer, program = traced_step()
    saved = copy.deepcopy(optimizer.state_dict())
    program.run(program.inputs)
    optimizer.load_state_dict(saved)
    assert program.lifted.is_current()
    first = next(iter(optimizer.state.values()))
    listed = next(e.tensor for e in program.state if e.role == "optimizer")
    assert first["step"].data_ptr() == listed.data_ptr()
    assert float(listed) == 1.0
    program.run(program.inputs)
    assert float(first["step"]) == 2.0


COPIED = "values of a tensor copied to Python or NumPy"


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (float, "a number or a branch that depends on the values of tensors"),
        (lambda loss: torch.tensor([loss]).sum(), COPIED),
        (lambda loss: loss.numpy().item(), COPIED),
    ],
)
def test_a_value_read_on_the_host_is_refused(read: Any, what: str) -> None:
    """The message names the line in the user's code and what to do."""

    def reading(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        return loss * read(loss.detach())

    wanted = re.compile(
        rf"wanted a step that can be written as one program, got {what}, at test_step_program.py:\d+ in \S+; "
        r"remove what reads values on the host \(.item\(\), float\(\), .numpy\(\), torch.tensor\(\[...\]\) of "
        r"tensors, `if` on a tensor\) or use execution='compiled' or 'eager'$"
    )
    with pytest.raises(CaptureError, match=wanted):
        traced_step(loss=reading)


def test_what_torch_cannot_trace_is_refused() -> None:
    """Whatever it raises; its stand-in for this loss divides by the number of elements."""

    def of_no_rows(model: nn.Module, batch: Any) -> Tensor:
        found = model(batch["x"])[:0]
        return nn.functional.smooth_l1_loss(found, torch.zeros_like(found))

    wanted = re.compile(
        r"wanted a step that can be written as one program, got ZeroDivisionError: float division by zero, at "
        r"\S+:\d+ in smooth_l1_loss_backward, within the backward pass; use execution='eager'$"
    )
    with pytest.raises(CaptureError, match=wanted):
        traced_step(loss=of_no_rows)


def test_what_the_users_code_raises_stays_what_it_is() -> None:
    """A batch that the loss does not take is refused by the same error in every mode."""

    def picky(model: nn.Module, batch: Any) -> Tensor:
        if type(batch["x"]) is not Tensor:  # while it is traced
            raise LookupError("no such label")
        return loss_fn(model, batch)

    with pytest.raises(LookupError, match="no such label"):
        traced_step(loss=picky)


def test_a_value_that_goes_through_the_host_is_refused() -> None:
    """It would work here, wait for the device on a GPU, and cannot be captured."""

    def reading(model: nn.Module, batch: Any) -> Tensor:
        loss = loss_fn(model, batch)
        return loss + torch.full((), loss.item())

    wanted = re.compile(
        r"wanted a step that never waits for its own values, got aten\._local_scalar_dense\.default at "
        r"test_step_program\.py:\d+ in reading, which reads one on the host \(\.item\(\), float\(\), int\(\)\); "
        r"compute with tensors, or use execution='compiled' or 'eager'$"
    )
    with pytest.raises(CaptureError, match=wanted):
        traced_step(loss=reading)


def test_an_optimizer_without_its_state_is_refused() -> None:
    """State is made by the first step and cannot be an input before."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(CaptureError) as caught:
        trace_step(model, loss_fn, optimizer, batch_of(0))
    assert str(caught.value) == (
        "wanted the optimizer's state to exist before its step is traced, got 'step' made by Adam.step(); run "
        "one eager step first"
    )
    assert not optimizer.state


class Counting(torch.optim.SGD):
    """Counts its steps in a Python number, in one of three places."""

    def __init__(self, parameters: Any, place: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.count = 0
        self.places: dict[str, list[dict[str, Any]]] = {
            "the attributes": [self.__dict__],
            "a parameter group": self.param_groups,
        }
        self.place = place

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        states = [self.state[p] for group in self.param_groups for p in group["params"]]
        for store in self.places.get(self.place, states):
            store["count"] = store.get("count", 0) + 1
        return result


@pytest.mark.parametrize("place", ["the state", "a parameter group", "the attributes"])
def test_a_count_in_a_python_number_is_refused(place: str) -> None:
    """It would stand still in a program; tracing leaves it as it was."""
    made = []

    def counting(model: nn.Module) -> torch.optim.Optimizer:
        made.append(Counting(model.parameters(), place))
        return made[0]

    with pytest.raises(CaptureError) as caught:
        traced_step(counting)
    assert str(caught.value) == (
        f"wanted everything that changes between steps in tensors, got 'count' as int in {place} of Counting; "
        "use execution='compiled' or 'eager', or an optimizer that counts in tensors"
    )
    assert made[0].count == (place == "the attributes")
    assert made[0].param_groups[0].get("count", 1) == 1


def test_a_parameter_outside_of_the_model_is_refused() -> None:
    """Where the loss would read it cannot be found."""
    model = Net()
    outside = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    with pytest.raises(PlanError, match=r"got one of shape \(2,\) that is in neither; make it a"):
        trace_step(model, loss_fn, optimizer, batch_of(0))
