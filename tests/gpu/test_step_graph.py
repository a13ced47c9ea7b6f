"""Steps as one program on a GPU: compiled, replayed as one CUDA graph, equal to the eager step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.packages.package import read_package
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.runner import StepGraphRunner
from ridgeline.runtime.steps.whole_step.saved.loaded import LoadedStep
from ridgeline.runtime.steps.whole_step.saved.saving import load_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 10


@pytest.fixture(autouse=True)
def compiled_in_this_process() -> Iterator[None]:
    """The compiler's pool of processes would outlive the test."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def make(dropout: float = 0.25) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * 64, 32),
        nn.Dropout(dropout),
        nn.Linear(32, 10),
    ).cuda()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(index: int, size: int = 16) -> Any:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 1, 8, 8, generator=generator)
    return x.cuda(), torch.randint(0, 10, (size,), generator=generator).cuda()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.003)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.003, fused=True)


def train(execution: Any, make_optimizer: Any, **settings: Any) -> tuple[list[float], PlannedStep]:
    """Losses of some steps with a scheduler and one uneven batch; dropout is seeded for every step."""
    model = make()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    clip_norm = settings.pop("clip_norm", None)
    losses = []
    plan = Plan(execution=execution, **settings)
    with PlannedStep(model, loss_fn, optimizer, plan, clip_norm=clip_norm) as step:
        for index in range(STEPS):
            torch.manual_seed(index)
            losses.append(float(step(batch_of(index, 10 if index == 6 else 16))))
            optimizer._opt_called = True
            scheduler.step()
    return losses, step


@pytest.mark.parametrize(
    ("execution", "make_optimizer", "settings"),
    [
        ("step-graph", sgd, {"clip_norm": 0.1, "accumulate": 2}),
        ("step-graph", adamw, {}),
        ("step-graph", fused, {"clip_norm": 0.1}),
        ("packaged", adamw, {"clip_norm": 0.1}),
    ],
)
def test_steps_equal_eager_ones(execution: Any, make_optimizer: Any, settings: Any) -> None:
    """Losses stay close to eager's with batch norm, dropout, clipping, micro-batches, a scheduler."""
    got, step = train(execution, make_optimizer, **settings)
    wanted, _ = train("eager", make_optimizer, **settings)
    assert got == pytest.approx(wanted, rel=2e-3, abs=2e-4)
    assert step.timeline().counters["eager_steps"] == 1


def test_dropout_goes_on_between_replays() -> None:
    """Random state is no constant of the graph: equal batches give different losses."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with PlannedStep(model, loss_fn, optimizer, Plan(execution="step-graph")) as step:
        assert len({float(step(batch_of(0))) for _ in range(8)}) > 6


def test_learning_rates_reach_the_graph() -> None:
    """A rate of 0 freezes the parameters, without another capture."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, loss_fn, optimizer, Plan(execution="step-graph")) as step:
        for index in range(4):
            step(batch_of(index))
        optimizer.param_groups[0]["lr"] = 0.0
        before = [p.detach().clone() for p in model.parameters()]
        step(batch_of(4))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert "recaptures" not in step.timeline().counters


def test_a_tensor_on_the_host_is_refused_before_the_capture() -> None:
    """Class weights on the CPU would break the capture and the process with it."""
    weights = torch.ones(())

    def bringing(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * weights

    model = make()
    with PlannedStep(model, bringing, sgd(model), Plan(execution="step-graph")) as step:
        step(batch_of(0))
        with pytest.raises(
            CaptureError, match="wanted all of the step's tensors on the GPU, got some on cpu"
        ):
            step(batch_of(1))
    assert float(torch.ones(2, device="cuda").sum()) == 2.0


def test_a_saved_step_goes_on(tmp_path: Path) -> None:
    """A step loaded from its file continues with the losses of the uninterrupted run."""
    model = make()
    with PlannedStep(model, loss_fn, adamw(model), Plan(execution="packaged")) as step:
        for index in range(4):
            step(batch_of(index))
        runner = step._runner
        assert isinstance(runner, StepGraphRunner)
        path = runner.save(tmp_path / "step.pt2")
        wanted = [float(step(batch_of(index))) for index in range(4, 8)]
    loaded = load_step(read_package(path))
    assert isinstance(loaded, LoadedStep)
    assert [float(loaded(batch_of(index))) for index in range(4, 8)] == pytest.approx(
        wanted, rel=1e-6
    )
    loaded.close()


def summing(model: nn.Module, batch: Any) -> Tensor:
    """Adds up in the batch what it has seen."""
    batch[2].add_(batch[0])
    return loss_fn(model, batch)


def summed(index: int) -> Any:
    x, y = batch_of(index)
    return x, y, torch.ones_like(x)


def test_an_eager_step_is_saved_with_its_counts_on_the_device(tmp_path: Path) -> None:
    """Adam counts on the host: the file holds the counts where its program reads them, the optimizer as before.

    What the loaded step writes into its batch is in the caller's.
    """
    model = make(dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    with PlannedStep(model, summing, optimizer, Plan(optimizer="as-is")) as step:
        for index in range(3):
            step(summed(index))
        counts = [state["step"] for state in optimizer.state.values()]
        assert {count.device.type for count in counts} == {"cpu"}
        path = step.save(tmp_path / "step.pt2", summed(0))
        after = [state["step"] for state in optimizer.state.values()]
        assert all(mine is theirs for mine, theirs in zip(after, counts, strict=True))
        wanted = [float(step(summed(index))) for index in range(3, 7)]
    loaded = load_step(read_package(path))
    batches = [summed(index) for index in range(3, 7)]
    assert [float(loaded(batch)) for batch in batches] == pytest.approx(wanted, rel=2e-3, abs=2e-4)
    assert torch.equal(batches[0][2], batches[0][0] + 1.0)
    loaded.close()
