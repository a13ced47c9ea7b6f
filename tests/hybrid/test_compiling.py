"""Compiled forms of a step: regions are found, switched on for steps only, and train like the eager step."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.errors import CaptureError, EquivalenceError
from ridgeline.model_graphs.step_forms import make_form
from ridgeline.plan import Plan
from ridgeline.programs import inductor
from ridgeline.programs.compiling import (
    MOST_VARIANTS,
    CompiledRegions,
    find_regions,
)
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tasks.resnet18 import ResNet18
from torchrun import torchrun

CHECK_WORKER = Path(__file__).parent / "check_worker.py"
PARITY = Path(__file__).parents[1] / "runtime" / "parity_cases.py"


class Block(nn.Module):
    """A block as a model repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.relu(self.linear(x)))


def make_model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)], nn.Dropout(dropout), nn.Linear(8, 4))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 8, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_regions(model)]


@pytest.mark.parametrize("kind", ["compiled", "regional"])
def test_advice_on_what_a_plan_decides_is_not_passed_on(kind: str) -> None:
    """A compiled form keeps the compiler's advice on TF32 from its user, and no other warning."""
    tf32 = f"{inductor.ADVICE[0]}. Consider setting `torch.set_float32_matmul_precision('high')`."
    softmax = (
        "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_form(kind, loss_fn, make_model(), notes=[])
        warnings.warn(tf32, UserWarning, stacklevel=1)
        warnings.warn(softmax, UserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="of another kind"):
            warnings.warn("of another kind", UserWarning, stacklevel=1)


def test_the_outermost_repeated_blocks_are_regions() -> None:
    """Residual blocks, not the stages around them nor the convolutions inside."""
    assert names(ResNet18()) == [
        f"stages.{stage}.{block}" for stage in range(4) for block in range(2)
    ]


def test_sequences_repeat_by_what_is_in_them() -> None:
    """Without repeated classes, sequential containers of equal content are regions."""
    pair = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    assert names(nn.Sequential(*pair, nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))) == ["0", "1", "2"]


def test_a_shared_block_is_one_region() -> None:
    """The same module in two places is not a repetition of structure, but it is not lost either."""
    block = Block()
    assert names(nn.Sequential(block, block, Block())) == ["0", "2"]


def test_a_model_without_repetition_is_refused() -> None:
    """The message names the model and the form to use instead."""
    message = (
        "wanted a model with repeated blocks for execution by region, got Linear in which no composite "
        r"module occurs twice; compile it whole \('compiled'\)"
    )
    with pytest.raises(CaptureError, match=message):
        CompiledRegions(nn.Linear(2, 2))


@pytest.mark.parametrize("is_replayed", [True, False])
def test_code_between_regions_goes_one_way(
    monkeypatch: pytest.MonkeyPatch, is_replayed: bool
) -> None:
    """If a graph replays the step, it goes the way that it takes in a capture from the first step on."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    told: list[bool] = []

    def asking(model: nn.Module, batch: Any) -> Tensor:
        told.append(torch.cuda.is_current_stream_capturing())
        raise ValueError("the user's own")

    form = make_form("regional", asking, make_model(), notes=[], is_replayed=is_replayed)
    with pytest.raises(ValueError, match="the user's own"):
        form(make_model(), batch_of(2, 0))
    assert told == [is_replayed]
    assert torch.cuda.is_current_stream_capturing is bool


def test_regions_are_compiled_inside_active_only() -> None:
    """Outside, and after an error inside, the model is as it was, and so is the compiler's limit."""
    model = make_model()
    limit = torch._dynamo.config.recompile_limit
    regions = CompiledRegions(model)
    with pytest.raises(ZeroDivisionError), regions.active():
        divmod(1, 0)
    with regions.active():
        assert all(module._compiled_call_impl for module in list(model)[:3])
    assert not any(module._compiled_call_impl for module in model.modules())
    assert torch._dynamo.config.recompile_limit == limit < MOST_VARIANTS


def test_what_the_user_compiled_stays_compiled() -> None:
    """A block of the user's own `compile` lost it when steps by region were made."""
    model = make_model()
    model[0].compile(backend="eager")
    own = model[0]._compiled_call_impl
    with CompiledRegions(model).active():
        assert model[0]._compiled_call_impl is not own
    assert model[0]._compiled_call_impl is own is not None


@pytest.fixture(scope="module")
def eager_losses() -> list[float]:
    """What the eager step's losses are, with dropout and an uneven batch."""
    return train("eager")[0]


def train(execution: Any) -> tuple[list[float], PlannedStep]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    with PlannedStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu") as step:
        for index in range(10):
            losses.append(float(step(batch_of(5 if index == 6 else 12, index))))
            scheduler.step()
    return losses, step


@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_a_compiled_step_trains_like_the_eager_one(
    execution: str, eager_losses: list[float]
) -> None:
    """Same losses with dropout, a scheduler and an uneven batch; the check is noted, the seconds counted."""
    losses, step = train(execution)
    assert losses == pytest.approx(eager_losses, abs=1e-4)
    assert any(note.startswith(f"{execution} equals the eager step within ") for note in step.notes)
    counters = step.timeline().counters
    assert counters["compile_s"] > 0.0
    assert counters["recompiles"] == 1.0  # the uneven batch


def test_a_step_that_is_wrong_on_one_worker_is_refused_by_all(tmp_path: Path) -> None:
    """The workers look closer together, or those that do would wait for the others for ever."""
    torchrun(2, CHECK_WORKER, tmp_path / "error")
    errors = [(tmp_path / f"error.{rank}").read_text() for rank in range(2)]
    assert errors[0] == errors[1]
    assert "wanted execution='compiled' to equal the eager step within" in errors[0]


def test_a_form_that_computes_something_else_is_caught() -> None:
    """A compiled step whose loss is scaled is refused before it trains, and the state is put back."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with PlannedStep(model, loss_fn, optimizer, Plan(execution="compiled"), device="cpu") as step:
        step._body.form._compiled = lambda model, batch: 1.5 * loss_fn(model, batch)  # type: ignore[attr-defined]
        with pytest.raises(
            EquivalenceError, match=r"got a difference of 0\.5 over 3 perturbed steps"
        ):
            step(batch_of(12, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_decision_that_python_draws_and_a_program_does_not_is_caught() -> None:
    """Python's generator is perturbed with torch's, so that what was drawn once does not look right."""
    model = make_model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def drawing(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * (1.0 + random.random())

    random.seed(0)
    once = random.random()
    random.seed(0)
    with PlannedStep(model, drawing, optimizer, Plan(execution="compiled"), device="cpu") as step:
        step._body.form._compiled = lambda model, batch: loss_fn(model, batch) * (1.0 + once)  # type: ignore[attr-defined]
        with pytest.raises(EquivalenceError, match=r"something in the step is baked in"):
            step(batch_of(12, 0))


def test_the_check_leaves_what_a_step_keeps_as_it_was() -> None:
    """A hidden state carried on, a running mean, a count and a log are the plain loop's afterwards."""
    outcomes = []
    for plan in (Plan(), Plan(execution="compiled")):
        model = make_model(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        carried = {"loss": torch.zeros(()), "count": 0}
        mean, log = torch.zeros(()), []

        def carrying(
            model: nn.Module, batch: Any, carried: Any = carried, mean: Any = mean, log: Any = log
        ) -> Tensor:
            loss = loss_fn(model, batch) * (1.0 + carried["loss"] + mean)
            carried["loss"] = loss.detach()
            carried["count"] += 1
            mean.mul_(0.9).add_(0.1 * loss.detach())
            log.append(carried["count"])
            return loss

        with PlannedStep(model, carrying, optimizer, plan, device="cpu") as step:
            if plan.execution == "compiled":
                step._body.form._compiled = carrying  # type: ignore[attr-defined]
            losses = [float(step(batch_of(12, index))) for index in range(3)]
        assert log == [1, 2, 3]
        outcomes.append((losses, float(mean), [p.tolist() for p in model.parameters()]))
    assert outcomes[0] == outcomes[1]


def test_what_only_runs_as_written_is_refused_with_a_way_out() -> None:
    """A gradient of a gradient: torch's compiler raises an error of its own in the backward pass."""

    def penalty(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        # Under a name that is asked for while it runs, which is not found before the first step.
        grad = vars(torch.autograd)["grad"]
        (gradient,) = grad(model(x).square().sum(), x, None, True, True)
        return (gradient.norm(dim=1) - 1).square().mean()

    model = make_model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    message = "wanted execution='compiled' to run a step that runs as written, got .*; use exec"
    plan = Plan(execution="compiled")
    with (
        PlannedStep(model, penalty, optimizer, plan, device="cpu") as step,
        pytest.raises(CaptureError, match=message),
    ):
        step(batch_of(12, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_gradients_that_are_rounding_are_no_difference() -> None:
    """A bias before batch norm has a gradient of rounding only, which Adam turns into whole steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with PlannedStep(model, loss_fn, optimizer, Plan(execution="compiled"), device="cpu") as step:
        for index in range(3):
            step(batch_of(12, index))
    assert step.notes[-1].startswith("compiled equals the eager step within ")


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # an interpreter is none
def test_compiling_again_is_counted_and_said() -> None:
    """A Python number that changes from step to step stays correct and does not stay unnoticed."""
    model = make_model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scale = [1.0]

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * scale[0]

    plan = Plan(execution="compiled")
    with interpreted(), PlannedStep(model, scaled, optimizer, plan, device="cpu") as step:
        first = float(step(batch_of(12, 0)))
        optimizer.param_groups[0]["lr"] = 0.0
        second = float(step(batch_of(12, 0)))
        scale[0] = 3.0
        assert float(step(batch_of(12, 0))) == pytest.approx(3.0 * second)
        assert step.timeline().counters["recompiles"] == 1.0
    assert first != second
    assert step.notes[-1].startswith("compiled again after the check, because a shape or a value")


def test_two_workers_train_by_region_as_ddp_does(tmp_path: Path) -> None:
    """Blocks compiled one by one hand their gradients to the same buckets; parameters follow DDP's."""
    output = tmp_path / "parity.json"
    torchrun(2, PARITY, output, "cpu", "regional", "blocks")
    results = json.loads(output.read_text())
    assert sorted(results) == ["blocks / adamw", "blocks / sgd"]
    assert max(result["gap"] for result in results.values()) < 1e-4
