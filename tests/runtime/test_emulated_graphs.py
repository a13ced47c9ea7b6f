"""Steps that graphs replay train as the plain loop does, whatever changes; graphs are emulated on the CPU."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.capture.capturing import ANOMALIES
from ridgeline.errors import CaptureError, ObstacleError, SideEffectError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tensors.usual_shapes import OTHER_LAYOUTS

STEPS = 12
REPLAYED: tuple[Execution, ...] = ("graph", "model-graph")


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    with emulated_graphs():
        yield


class Net(nn.Module):
    """Two layers, batch norm and dropout, and a parameter that only the optimizer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.out = nn.Linear(8, 3)
        self.proxy = [nn.Parameter(torch.ones(3))]
        self.scale: list[float] = [1.0]
        self.is_first, self.shown, self.pair = True, None, ()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.hidden(x)).relu())
        by = self.scale[0] if x.is_contiguous() else 3.0 * self.scale[0]
        if self.is_first:
            by, self.is_first = 5.0 * by, False
        self.shown, self.pair = y.detach(), (y.detach() * 2.0, y.detach())
        return self.out(y) * self.proxy[0] * by


class Part(nn.Module):
    """A class whose method changes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() * 2.0


class Whole(nn.Sequential):
    """What is compiled: torch's compiler reads it in one piece."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x)
        return x


FORWARD = Part.forward


def classify(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    parameters = [*model.parameters(), *model.proxy]
    return model, torch.optim.SGD(parameters, 0.1, momentum=0.9)


Change = Callable[[Net, torch.optim.Optimizer], object]


def trained(
    execution: Execution, change: Change, *, strided: bool = False, when: int = 7
) -> tuple[Any, ...]:
    """Losses, state, gradients and random state after a change between two steps, before step `when`."""
    model, optimizer = make()
    torch.manual_seed(1)
    losses = []
    with PlannedStep(model, classify, optimizer, Plan(execution=execution), device="cpu") as step:
        for index in range(STEPS):
            if index == when:
                change(model, optimizer)
            x, y = batch_of(index)
            if strided and index in (6, 8, 9):
                x = x.t().contiguous().t()
            losses.append(float(step((x, y))))
        notes = step.notes
    parameters = [*model.parameters(), *model.proxy]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    state = [*model.state_dict().values(), *model.proxy, model.shown, model.pair[0]]
    return losses, state, gradients, torch.get_rng_state(), notes


def nothing(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Nothing changes."""


def scale(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.scale[0] = 2.0


def drop_more(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.drop.p = 0.7


def first_again(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.is_first = True


def take_from_optimizer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    held = optimizer.param_groups[0]["params"]
    held[:] = [parameter for parameter in held if parameter is not model.out.bias]


def clear_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def hook_step(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: model.out.bias.data.add_(0.1))


def put_step(model: Net, optimizer: torch.optim.Optimizer) -> None:
    plain = optimizer.step
    optimizer.step = lambda *args: (plain(*args), model.out.bias.data.add_(0.1))[0]


def hook_module(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.hidden.register_forward_hook(lambda _module, _args, out: out * 2.0)


def leave_other_gradients(model: Net, optimizer: torch.optim.Optimizer) -> None:
    take_from_optimizer(model, optimizer)
    model.out.bias.grad = None


def replace_parameter(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.out.bias = nn.Parameter(torch.ones(3))


def leave_gradients(model: Net, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("execution", REPLAYED)
@pytest.mark.parametrize(
    "change",
    [
        *(nothing, scale, drop_more, first_again, take_from_optimizer, clear_state, hook_step),
        *(put_step, hook_module, leave_gradients, leave_other_gradients),
    ],
)
def test_what_changes_is_noticed(change: Change, execution: Execution) -> None:
    """Losses, parameters (also those outside of the model), buffers, gradients, random numbers."""
    wanted, got = trained("eager", change), trained(execution, change)
    torch.testing.assert_close(got[:3], wanted[:3], rtol=1e-4, atol=1e-5)
    assert torch.equal(got[3], wanted[3])
    assert any("equals the eager step" in note for note in got[4])


@pytest.mark.parametrize("shown", ["wanted", "parameter"])
def test_gradients_that_no_step_clears_add_up(shown: str) -> None:
    """Of batches, and of a parameter that the optimizer does not hold: replays write over none of them."""
    found = []
    for execution in ("eager", "model-graph"):
        model, optimizer = make()
        xs = []
        plan = Plan(execution=execution)
        with PlannedStep(model, classify, optimizer, plan, device="cpu") as step:
            for index in range(6):
                if index == 3:
                    take_from_optimizer(model, optimizer)
                x, y = batch_of(index)
                xs.append(x.requires_grad_(shown == "wanted"))
                step((x, y))
        found.append([model.out.bias.grad, *(x.grad for x in xs if shown == "wanted")])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("execution", REPLAYED)
def test_gradients_add_up_that_were_cleared_when_the_graph_was_captured(
    execution: Execution,
) -> None:
    """By somebody who clears those of the whole model, and stops doing so; one unused gets none."""
    found = []
    for name in ("eager", execution):
        model, optimizer = make()
        take_from_optimizer(model, optimizer)
        model.unused = nn.Parameter(torch.ones(2))
        with PlannedStep(model, classify, optimizer, Plan(execution=name), device="cpu") as step:
            for index in range(10):
                if index < 7:
                    model.zero_grad()
                step(batch_of(index))
        assert model.unused.grad is None
        found.append(model.out.bias.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", ["model-graph", "compiled+model-graph"])
def test_hooks_on_gradients_are_called_once(execution: Execution) -> None:
    """Beside the replay: one that was there before the first step, one put later, and what both read."""
    found = []
    for name in ("eager", execution):
        torch.manual_seed(0)
        model, calls, factor = Whole(nn.Linear(6, 8), Part(), nn.Linear(8, 3)), list[int](), [2.0]
        model[0].weight.register_hook(lambda g, calls=calls: calls.append(1))
        optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution=name)
        with interpreted(), PlannedStep(model, classify, optimizer, plan, device="cpu") as step:
            for index in range(9):
                if index == 4:
                    model[0].weight.register_hook(lambda g, by=factor: g * by[0])
                if index == 5:
                    model[2].bias.requires_grad_(False)  # captured again
                factor[0] = float(index)
                counted = len(calls)
                step(batch_of(index))
            assert len(calls) == counted + 1
        found.append([*model.parameters(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", [*REPLAYED, "compiled+graph", "compiled+model-graph"])
def test_another_method_of_a_class_is_captured(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In compiled forms too, whose compiler trusts that a class stays as it is."""
    losses = []
    for name in ("eager", execution):
        monkeypatch.setattr(Part, "forward", FORWARD)
        torch.manual_seed(0)
        model = Whole(nn.Linear(6, 8), Part(), nn.Linear(8, 3))
        optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution=name)
        with interpreted(), PlannedStep(model, classify, optimizer, plan, device="cpu") as step:
            for index in range(10):
                if index == 6:
                    monkeypatch.setattr(Part, "forward", lambda part, x: x * 0.5)
                losses.append(float(step(batch_of(index))))
    torch.testing.assert_close(losses[10:], losses[:10], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("execution", REPLAYED)
def test_steps_under_anomaly_detection_run_without_a_graph(execution: Execution) -> None:
    """It looks at each gradient on the host, and is to raise where one is no number."""
    losses = []
    for name in ("eager", execution):
        model, optimizer = make()
        with PlannedStep(model, classify, optimizer, Plan(execution=name), device="cpu") as step:
            for index in range(16):
                model.scale[0] = 1.0 + index // 4
                is_on = index % 7 in (0, 1, 5)
                with torch.autograd.set_detect_anomaly(is_on):
                    losses.append(float(step(batch_of(index))))
            x, y = batch_of(0)
            with (
                torch.autograd.set_detect_anomaly(True),
                pytest.raises(RuntimeError, match="nan values"),
            ):
                step((x * torch.nan, y))
    torch.testing.assert_close(losses[16:], losses[:16], rtol=1e-4, atol=1e-5)
    assert ANOMALIES in step.notes
    assert any("equals the eager step" in note for note in step.notes)


@pytest.mark.parametrize("execution", REPLAYED)
@pytest.mark.parametrize("change", [replace_parameter, clear_state, hook_step, take_from_optimizer])
def test_what_changes_right_before_the_capture_is_no_part_of_it(
    change: Change, execution: Execution
) -> None:
    """Gradients that nobody clears, and state, are made by a step before it, and not by each replay."""
    wanted, got = (trained(name, change, when=EAGER_STEPS) for name in ("eager", execution))
    torch.testing.assert_close(got[:3], wanted[:3], rtol=1e-4, atol=1e-5)
    assert any("equals the eager step" in note for note in got[4])


@pytest.mark.parametrize("execution", REPLAYED)
def test_batches_that_lie_otherwise_are_told_apart_each_time(execution: Execution) -> None:
    """A branch on the layout of the input is another program."""
    wanted, got = (trained(name, nothing, strided=True) for name in ("eager", execution))
    torch.testing.assert_close(got[:3], wanted[:3], rtol=1e-4, atol=1e-5)
    assert execution != "graph" or OTHER_LAYOUTS in got[4]


def test_a_batch_that_wants_gradients_runs_without_a_graph() -> None:
    """Each time it gets its own."""
    found = []
    for plan in (Plan(), Plan(execution="graph")):
        model, optimizer = make()
        with PlannedStep(model, classify, optimizer, plan, device="cpu") as step:
            for index in range(8):
                x, y = batch_of(index)
                step((x.requires_grad_(index in (0, 5, 6)), y))
                found.append(x.grad)
    for wanted, got in zip(found[:8], found[8:], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_last_batch_of_an_epoch_has_a_graph_of_its_own(kind: Any, accumulate: int) -> None:
    """From its second time on, and the graph of the others stays."""
    weights = []
    for execution in ("eager", "graph"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = kind(model.parameters(), 0.01)
        plan = Plan(execution=execution, accumulate=accumulate)
        with PlannedStep(model, classify, optimizer, plan, clip_norm=0.1, device="cpu") as step:
            for index in range(24):
                x, y = batch_of(index)
                step((x[:6], y[:6]) if index % 7 == 6 else (x, y))
            counters = step.timeline().counters
        weights.append(model[0].weight.detach().clone())
    assert (counters["shapes"], counters["eager_steps"]) == (2.0, 1.0)
    assert "recaptures" not in counters
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-4)


def counted(model: Net, numbers: list[int]) -> Any:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        numbers[0] += 1
        return classify(net, batch) * numbers[0]

    return loss


def drawn(model: Net, generator: np.random.Generator) -> Any:
    model.forward = lambda x, inner=model.forward: inner(x) * float(generator.random())
    return classify


def hooked(model: Net, factor: list[float]) -> Any:
    model.out.weight.register_hook(lambda g: g * factor[0])
    return classify


def hooked_module(model: Net, factor: list[float]) -> Any:
    model.out.register_full_backward_hook(lambda _module, grads, _: (grads[0] * factor[0],))
    return classify


def counting(model: Net, counts: Any) -> Any:
    return lambda net, batch: classify(net, batch) * (1 + next(counts))


@pytest.mark.parametrize(
    ("execution", "make_loss", "kept", "error", "words"),
    [
        ("graph", counted, [0], ObstacleError, "a change of an element of a list in Python"),
        ("graph", drawn, np.random.default_rng(5), ObstacleError, "a change of a Generator"),
        ("model-graph", drawn, np.random.default_rng(5), CaptureError, "would not notice changes"),
        ("graph", hooked, [2.0], ObstacleError, "without hooks on their gradients, since"),
        ("graph", hooked_module, [2.0], CaptureError, "would not notice changes of what it reads"),
        ("model-graph", hooked_module, [2.0], CaptureError, "would not notice changes of what"),
        ("graph", counting, itertools.count(), SideEffectError, "cannot be taken back|within its"),
    ],
)
def test_what_a_graph_would_bake_in_is_refused_without_a_trace(
    execution: Execution, make_loss: Any, kept: Any, error: Any, words: str
) -> None:
    """By name; counts and generators are then where the plain loop's steps have left them."""
    model, optimizer = make()
    loss = make_loss(model, kept)
    before, done = repr(getattr(kept, "bit_generator", None) and kept.bit_generator.state), []

    def train(step: PlannedStep) -> None:
        for index in range(STEPS):
            step(batch_of(index))
            done.append(index)

    with PlannedStep(model, loss, optimizer, Plan(execution=execution), device="cpu") as step:
        with pytest.raises(error, match=words):
            train(step)
        assert len(done) in (0, 3), "it is refused before anything is replayed"
    if make_loss is counted:
        assert kept == [len(done)]
    if make_loss is drawn:
        assert repr(kept.bit_generator.state) == before
    if make_loss is counting:
        assert next(kept) == len(done)
