"""Whole-step graphs on a GPU: equal to the eager step, guarded, and never silently something else."""

import itertools
import os
from typing import Any

import pytest
import torch
from quiet_device import holds_when_quiet, in_turns
from torch import Tensor, nn

from ridgeline.capture.capturing import ANOMALIES
from ridgeline.errors import CaptureError, EquivalenceError, SideEffectError
from ridgeline.feeding import feed
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tensors.usual_shapes import OTHER_LAYOUTS, OTHER_SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * 64, 10),
    ).cuda()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 1, 8, 8, generator=generator)
    return x.cuda(), torch.randint(0, 10, (size,), generator=generator).cuda()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.003)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_twenty_steps_equal_eager(
    make_optimizer: Any, clip_norm: float | None, accumulate: int
) -> None:
    """With a scheduler and an uneven last batch, the graph's parameters stay close to eager's."""
    results = []
    for execution in ("eager", "graph"):
        model = make()
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        plan = Plan(execution=execution, accumulate=accumulate)
        with PlannedStep(model, loss_fn, optimizer, plan, clip_norm=clip_norm) as step:
            for index in range(20):
                step(batch_of(10 if index % 7 == 6 else 16, index))
                scheduler.step()
            results.append([p.detach().clone() for p in model.parameters()])
            if execution == "graph":
                counters = step.timeline().counters
                assert (counters["eager_steps"], counters["shapes"]) == (1.0, 2.0)
                assert OTHER_SHAPES in step.notes
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=2e-3, atol=2e-4)


def test_dropout_goes_on_between_replays() -> None:
    """Random state is no constant of the graph: equal batches give different losses."""
    model = make(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with PlannedStep(model, loss_fn, optimizer, Plan(execution="graph")) as step:
        losses = {float(step(batch_of(16, 0))) for _ in range(12)}
    assert len(losses) > 6


def test_settings_that_change_are_not_baked_in() -> None:
    """Weight decay changed by the user leads to a new capture, counted, and to eager's parameters."""
    results = []
    for execution in ("eager", "graph"):
        model = make()
        optimizer = sgd(model)
        with PlannedStep(model, loss_fn, optimizer, Plan(execution=execution)) as step:
            for index in range(12):
                if index == 7:
                    optimizer.param_groups[0]["weight_decay"] = 0.5
                if index == 9:
                    optimizer.param_groups[0]["lr"] = 0.2
                step(batch_of(16, index))
            results.append([p.detach().clone() for p in model.parameters()])
            if execution == "graph":
                assert step.timeline().counters["recaptures"] == 1
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_weight_that_lies_otherwise_trains_on(make_optimizer: Any) -> None:
    """Its moments lie as it did before, which the fused kernels of a graph refuse."""
    results = []
    for execution in ("eager", "graph"):
        model = make()
        with PlannedStep(model, loss_fn, make_optimizer(model), Plan(execution=execution)) as step:
            for index in range(12):
                if index == 6:
                    weight = model[5].weight  # type: ignore[index]
                    weight.data = weight.data.t().contiguous().t()
                step(batch_of(16, index))
        results.append([p.detach().clone() for p in model.parameters()])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("execution", ["graph", "model-graph"])
def test_anomaly_detection_leaves_the_device_usable(execution: Execution) -> None:
    """Such steps run without a graph; no capture fails where something else changes meanwhile."""
    model = make()
    with PlannedStep(model, loss_fn, sgd(model), Plan(execution=execution)) as step:
        for index in range(12):
            if index == 7:
                freeze_the_statistics(model)
            with torch.autograd.set_detect_anomaly(index in (7, 8)):
                loss = step(batch_of(16, index))
    assert ANOMALIES in step.notes
    assert torch.isfinite(loss + torch.randn((), device="cuda"))


def freeze_the_convolution(model: nn.Module) -> None:
    model[0].requires_grad_(False)  # type: ignore[index]


def freeze_the_statistics(model: nn.Module) -> None:
    model[1].eval()  # type: ignore[index]


def replace_the_activation(model: nn.Module) -> None:
    model[2] = nn.Tanh()  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (freeze_the_convolution, "parameters were frozen or released"),
        (freeze_the_statistics, "a training flag changed"),
        (replace_the_activation, "a module was replaced"),
    ],
)
def test_a_model_that_changes_is_captured_anew(change: Any, why: str) -> None:
    """What is frozen, set to evaluate or replaced between steps trains on as it does in eager steps."""
    results = []
    for execution in ("eager", "graph"):
        model = make()
        with PlannedStep(model, loss_fn, sgd(model), Plan(execution=execution)) as step:
            for index in range(14):
                if index == 8:
                    change(model)
                step(batch_of(16, index))
            results.append([t.detach().clone() for t in model.state_dict().values()])
            if execution == "graph":
                assert step.timeline().counters["recaptures"] == 1
                assert f"captured again because {why}" in step.notes
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=2e-3, atol=2e-4)


def test_a_constant_baked_in_is_caught() -> None:
    """A loss that depends on numbers nobody sees trains differently when replayed: refused, not used."""
    calls = itertools.count(1)

    def counting(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * (1.0 + next(calls))

    def seeded(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * (1.0 + torch.initial_seed() % 7)

    def drawing(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * (1.0 + os.urandom(1)[0])

    differs = r"execution=.graph. to equal the eager step"
    # Its eager step differs from itself: where the check takes both for equal, nobody can read the code.
    drawn = f"{differs}|read in one piece, got .*; replays of a graph would not notice"
    for loss, num_steps, refusal, words in (
        (counting, 0, SideEffectError, r"got calls \(a count\) within its reach"),
        (seeded, EAGER_STEPS, EquivalenceError, differs),
        (drawing, EAGER_STEPS, (EquivalenceError, CaptureError), drawn),
    ):
        model = make()
        with PlannedStep(model, loss, sgd(model), Plan(execution="graph")) as step:
            for index in range(num_steps):
                step(batch_of(16, index))
            with pytest.raises(refusal, match=words):
                step(batch_of(16, num_steps))


class Recurrent(nn.Module):
    """Carries its hidden state from batch to batch in an attribute; or only shows it."""

    def __init__(self, *, carries: bool) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.carries, self.hidden = carries, torch.zeros(64, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        y = self.cell(x.flatten(1)).tanh()
        if self.carries:
            y = y + 0.1 * self.hidden
        self.hidden = y.mean(0).detach()
        return self.head(y)


@pytest.mark.parametrize("execution", ["graph", "compiled+graph"])
def test_state_in_python_is_not_frozen(execution: Execution) -> None:
    """A hidden state that the next step reads is refused; one that is only shown is renewed by replays."""
    model = Recurrent(carries=True).cuda()
    with PlannedStep(model, loss_fn, sgd(model), Plan(execution=execution)) as step:
        with pytest.raises(CaptureError, match="a change of 'hidden' in Python"):
            step(batch_of(8, 0))
        assert torch.randn(4, device="cuda").isfinite().all(), "nothing was captured"
    shown = []
    for name in ("eager", execution):
        torch.manual_seed(0)
        model = Recurrent(carries=False).cuda()
        with PlannedStep(model, loss_fn, sgd(model), Plan(execution=name)) as step:
            for index in range(EAGER_STEPS + 4):
                step(batch_of(8, index))
            shown.append(model.hidden.clone())
    torch.testing.assert_close(*shown, rtol=1e-3, atol=1e-4)


def test_a_batch_of_another_shape_runs_without_the_graph() -> None:
    """A larger batch trains as it would eagerly, is counted and noted, and the graph goes on."""
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    with (
        PlannedStep(models[0], loss_fn, sgd(models[0]), Plan(execution="graph")) as step,
        PlannedStep(models[1], loss_fn, sgd(models[1]), Plan()) as eager,
    ):
        for index, size in enumerate((16, 16, 16, 16, 16, 32, 24, 16)):
            batch = batch_of(size, index)
            torch.testing.assert_close(step(batch), eager(batch), rtol=1e-3, atol=1e-4)
        assert step.timeline().counters["eager_steps"] == 2
        assert OTHER_SHAPES in step.notes


@pytest.mark.parametrize("looks", [True, False])
def test_a_batch_that_lies_otherwise_is_replayed_where_nobody_looks(looks: bool) -> None:
    """A branch on the layout is no constant of the graph."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        by = 1.0 if batch[0].is_contiguous() or not looks else 3.0
        return by * loss_fn(model, batch)

    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    with (
        PlannedStep(models[0], loss, sgd(models[0]), Plan(execution="graph")) as step,
        PlannedStep(models[1], loss, sgd(models[1]), Plan()) as eager,
    ):
        for index in range(8):
            x, y = batch_of(16, index)
            if index in (5, 6):
                x = x.flatten(1).t().contiguous().t().view(16, 1, 8, 8)
            torch.testing.assert_close(step((x, y)), eager((x, y)), rtol=1e-3, atol=1e-4)
        assert (OTHER_LAYOUTS in step.notes) == looks


@pytest.mark.quiet
def test_the_graph_is_faster_than_eager_and_its_frames_are_known() -> None:
    """A launch-bound step gains from one launch; frames inside the replay are measured."""
    models, batch = (make(), make()), batch_of(16, 0)
    with (
        PlannedStep(models[0], loss_fn, sgd(models[0]), Plan(execution="eager")) as eager,
        PlannedStep(models[1], loss_fn, sgd(models[1]), Plan(execution="graph")) as graph,
    ):

        def wrong() -> str:
            found = in_turns(
                {
                    "eager": lambda: [eager(batch) for _ in range(20)],
                    "graph": lambda: [graph(batch) for _ in range(20)],
                }
            )
            return "" if found["graph"] < found["eager"] else str(found)

        holds_when_quiet(wrong)
        names = [span.name for span in graph.timeline().frames]
    assert names == ["input", "forward", "backward", "optimizer"]


def test_feed_delivers_host_batches_to_the_gpu() -> None:
    """Order and content survive pinning, the copy stream and reuse of memory."""
    loader = [(torch.full((1 << 16,), float(i)), i) for i in range(30)]
    for wanted, (values, index) in enumerate(feed(loader, "cuda", 3)):
        assert values.is_cuda
        assert index == wanted
        assert float(values.mean()) == wanted


class LayerDrop(nn.Module):
    """Draws on the host whether to leave out a layer, as transformers' models do, with a probability of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.layerdrop = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            skips = torch.rand([]) < self.layerdrop
            if not skips:
                x = layer(x).relu()
        return x


@pytest.mark.parametrize("execution", ["graph", "compiled+graph"])
def test_draws_on_the_host_that_decide_nothing(execution: Execution) -> None:
    """The step is captured, equals eager, and leaves the host's generator where eager leaves it."""
    found = []
    for mode in ("eager", execution):
        torch.manual_seed(0)
        model = LayerDrop().cuda()
        torch.manual_seed(1)
        with PlannedStep(model, loss_fn, sgd(model), Plan(execution=mode)) as step:  # type: ignore[arg-type]
            losses = [float(step(batch_of(16, index))) for index in range(EAGER_STEPS + 5)]
            replayed = step.timeline().counters.get("eager_steps", 0)
        found.append((losses, torch.get_rng_state(), replayed))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert torch.equal(found[0][1], found[1][1])
    assert not found[1][2]


def test_a_recurrent_layers_dropout_writes_only_where_it_may() -> None:
    """Seeding has the next eager layer free what the graph draws from; who gets that memory keeps its values."""
    torch.manual_seed(0)
    model = nn.LSTM(32, 32, num_layers=2, dropout=0.5).cuda()
    batch = torch.randn(7, 5, 32, device="cuda")

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)[0].square().mean()

    with PlannedStep(model, loss_fn, sgd(model), Plan(execution="graph")) as step:
        for _ in range(EAGER_STEPS + 3):
            step(batch)
        assert step.timeline().counters.get("eager_steps", 0) == 0
        torch.manual_seed(1)
        loss_fn(model, batch)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        others = [torch.full((1 << 18,), 7, dtype=torch.int64, device="cuda") for _ in range(64)]
        losses = [float(step(batch)) for _ in range(5)]
        assert all(bool((other == 7).all()) for other in others)
        assert len({*losses}) == 5
        assert max(losses) < 1.0


class DroppedBefore(nn.Module):
    """Dropout, then a recurrent layer that drops something out itself."""

    def __init__(self, before: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(before)
        self.rnn = nn.LSTM(32, 32, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.drop(x))[0]


@pytest.mark.parametrize("before", [0.0, 0.1])
def test_a_recurrent_layers_dropout_is_that_of_the_eager_step(before: float) -> None:
    """From the first step on, through checks and capture, and after the user has seeded again."""

    def losses(execution: Execution) -> list[float]:
        torch.manual_seed(0)
        model = DroppedBefore(before).cuda()
        batch = torch.randn(7, 5, 32, device="cuda")
        plan = Plan(execution=execution)
        with PlannedStep(model, lambda m, b: m(b).square().mean(), sgd(model), plan) as step:
            found = [float(step(batch)) for _ in range(EAGER_STEPS + 4)]
            torch.manual_seed(4)
            return found + [float(step(batch)) for _ in range(3)]

    assert losses("graph") == pytest.approx(losses("eager"), rel=1e-4)
