"""Steps whose model is replayed while the loss runs as it was written, with a stand-in for the captures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import ObstacleError, PlanError
from ridgeline.execution import check_plan
from ridgeline.plan import Plan
from ridgeline.runtime import checked
from ridgeline.runtime.body import StepBody
from ridgeline.runtime.clocks import HostClock
from ridgeline.runtime.hybrid.capture.lint import check_capturable
from ridgeline.runtime.hybrid.capture.lint_model import inspect_model, model_kept
from ridgeline.runtime.hybrid.model.form import OTHER_CALLS, ModelGraphForm
from ridgeline.runtime.recorder import Recorder
from ridgeline.runtime.world import World


class Net(nn.Module):
    """Two layers with batch norm; its result is a dict with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return {"scores": self.out(self.norm(self.hidden(x)).relu()) * scale, "width": 8}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Which class is largest is asked on the host, as a matcher would."""
    scores = model(batch[0], scale=2.0)["scores"]
    weight = 1.0 if int(scores.argmax()) % 2 else 1.5
    return weight * nn.functional.cross_entropy(scores, batch[1])


def batch_of(seed: int, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


@dataclass
class StandIn:
    """Records captures, which call as a real one does; replays by calling."""

    num_captures: int = 0
    num_replays: int = 0
    num_closed: int = 0

    def __call__(
        self, model: nn.Module, run: Callable[..., Any], plain: Callable[..., Any], tensors: Any
    ) -> "Replaying":
        self.num_captures += 1
        with model_kept(model):
            run(*tensors)
        return Replaying(self, run)


@dataclass
class Replaying:
    owner: StandIn
    run: Callable[..., Any]

    def __call__(self, *tensors: Tensor) -> Any:
        assert torch.is_grad_enabled()
        self.owner.num_replays += 1
        return self.run(*tensors)

    def close(self) -> None:
        self.owner.num_closed += 1


def make(model: nn.Module, loss: Any = loss_fn) -> tuple[ModelGraphForm, StandIn, list[str]]:
    stand_in, notes = StandIn(), []
    form = ModelGraphForm(loss, model, None, notes=notes, capture=stand_in)
    return form, stand_in, notes


def run(form: ModelGraphForm, model: nn.Module, batch: Any) -> Tensor:
    with form.active():
        loss = form(model, batch)
    loss.backward()
    return loss.detach()


def test_losses_and_gradients_are_those_of_the_plain_step() -> None:
    results = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = Net()
        form, stand_in, notes = make(model)
        for seed in range(3):
            if is_plain:
                loss = loss_fn(model, batch_of(seed))
                loss.backward()
            else:
                loss = run(form, model, batch_of(seed))
        results.append(
            (loss.detach(), [p.grad for p in model.parameters()], model.norm.running_mean)
        )
    assert (stand_in.num_captures, stand_in.num_replays, notes) == (1, 3, [])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_outside_of_a_step_the_model_is_as_it_was() -> None:
    model = Net()
    form, stand_in, _ = make(model)
    run(form, model, batch_of(0))
    assert model._compiled_call_impl is None
    model(batch_of(1)[0])
    assert stand_in.num_replays == 1


def test_another_shape_and_setting_run_as_they_were_written() -> None:
    model = Net()
    form, stand_in, notes = make(model)
    run(form, model, batch_of(0))
    run(form, model, batch_of(0, size=4))
    assert notes == [OTHER_CALLS]
    with torch.autocast("cpu", torch.bfloat16):
        run(form, model, batch_of(0))
    assert (stand_in.num_captures, stand_in.num_replays) == (1, 1)


def test_a_second_call_before_backward_and_one_without_gradients_run_as_they_were_written() -> None:
    def twice(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = model(batch[0])["scores"]
        return loss_fn(model, batch) + (model(batch[0])["scores"] - target).square().mean()

    torch.manual_seed(0)
    model = Net()
    form, stand_in, _ = make(model, twice)
    losses = [run(form, model, batch_of(seed)) for seed in range(2)]
    assert stand_in.num_replays == 2
    torch.manual_seed(0)
    again = Net()
    wanted = [twice(again, batch_of(seed)).detach() for seed in range(2)]
    torch.testing.assert_close(losses, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("change", ["train", "freeze", "replace"])
def test_a_changed_model_is_captured_again(change: str) -> None:
    model = Net()
    form, stand_in, _ = make(model)
    run(form, model, batch_of(0))
    if change == "train":
        model.norm.eval()
    elif change == "freeze":
        model.hidden.bias.requires_grad_(False)
    else:
        model.out = nn.Linear(8, 3)
    run(form, model, batch_of(1))
    assert (stand_in.num_captures, stand_in.num_closed) == (2, 1)
    form.close()
    assert stand_in.num_closed == 2


def test_a_loss_that_never_calls_the_model_is_refused() -> None:
    def parts(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model.out(model.hidden(batch[0])), batch[1])

    form, _, _ = make(Net(), parts)
    with pytest.raises(ObstacleError, match="never calls Net itself"):
        run(form, form._model, batch_of(0))


def test_a_result_that_is_no_tensor_is_refused() -> None:
    class Odd(Net):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
            return {"scores": self.hidden(x), "odd": object()}

    form, _, _ = make(Odd())
    with pytest.raises(
        ObstacleError, match=r"results of Odd in tuples, lists, dicts or a dataclass, got object"
    ):
        run(form, form._model, batch_of(0))


@dataclass(frozen=True)
class Outcome:
    """What a network returns that knows nothing of pytrees."""

    scores: Tensor
    name: str
    width: int = 3


def test_a_dataclass_is_put_together_again() -> None:
    class Dataclassed(Net):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
            return Outcome(self.out(self.hidden(x)) * scale, "net")

    seen: list[Outcome] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(model(batch[0], scale=2.0))
        return nn.functional.cross_entropy(seen[-1].scores, batch[1])

    torch.manual_seed(0)
    model = Dataclassed()
    form, stand_in, _ = make(model, loss)
    got = run(form, model, batch_of(0))
    assert (stand_in.num_captures, stand_in.num_replays) == (1, 1)
    assert (type(seen[-1]), seen[-1].name, seen[-1].width) == (Outcome, "net", 3)
    torch.testing.assert_close(got, loss(model, batch_of(0)).detach())


def lint_of(model: nn.Module, *inputs: Tensor) -> Any:
    return inspect_model(model, lambda *x: (model(*x),), inputs, device="cpu")


def test_what_a_model_reads_on_the_host_is_found_and_its_state_is_put_back() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.layer(x))
            return y * 2 if y.sum().item() > 0 else y

    model = Reads()
    before, state = model.norm.running_mean.clone(), torch.get_rng_state()
    lint = lint_of(model, batch_of(0)[0])
    with pytest.raises(ObstacleError, match="item"):
        check_capturable(lint.findings)
    assert torch.equal(model.norm.running_mean, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_a_hidden_state_in_python_is_found() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.count = nn.Linear(6, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.layer(x) / self.count

    lint = lint_of(Counts(), batch_of(0)[0])
    assert any("count" in str(finding) for finding in lint.findings)


def test_a_plain_model_has_no_obstacles() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    lint = lint_of(model, batch_of(0)[0])
    assert (lint.findings, lint.doubts) == ((), ())


def test_arguments_that_change_in_place_and_results_without_gradients_are_refused() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mul_(2.0))

    class Detached(Changes):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).detach()

    with pytest.raises(ObstacleError, match="got Changes, which changes one in place"):
        lint_of(Changes(), batch_of(0)[0])
    with pytest.raises(ObstacleError, match="got none from Detached"):
        lint_of(Detached(), batch_of(0)[0])


class Tempered(Net):
    """Reads a number and a hidden state that others set."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.state = 1.0, torch.zeros(8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.norm(self.hidden(x)).relu() + self.state
        return {"scores": self.out(hidden) / self.temperature * scale, "hidden": hidden}


def set_temperature(model: nn.Module, batch: Any) -> Tensor:
    model.temperature *= 0.999
    return loss_fn(model, batch)


def hand_on(model: nn.Module, batch: Any) -> Tensor:
    result = model(batch[0])
    model.state = result["hidden"].mean(0).detach()
    return nn.functional.cross_entropy(result["scores"], batch[1])


def set_mask(model: nn.Module, batch: Any) -> Tensor:
    model.state = batch[0].new_zeros(8)
    return loss_fn(model, batch)


class Counting:
    """A loss that counts for itself, and shows what it saw."""

    def __init__(self) -> None:
        self.count, self.shown = 0, None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.count += 1
        loss = loss_fn(model, batch)
        self.shown = loss.detach()
        return loss / self.count


@pytest.mark.parametrize(
    ("loss", "what"), [(set_temperature, "temperature"), (hand_on, "state"), (set_mask, "state")]
)
def test_what_a_loss_sets_and_the_model_reads_is_refused(loss: Any, what: str) -> None:
    """A replayed model would read what it read at the capture, and slowly go wrong."""
    model = Tempered()
    temperature, state = model.temperature, model.state
    form, stand_in, _ = make(model, loss)
    with pytest.raises(ObstacleError, match=f"leaves alone what Tempered names.*{what}"):
        run(form, model, batch_of(0))
    assert stand_in.num_captures == 0
    assert model.temperature == temperature
    assert model.state is state


def test_a_loss_may_count_for_itself() -> None:
    """It runs as it was written; the look at it leaves no trace."""
    model, loss = Net(), Counting()
    form, stand_in, _ = make(model, loss)
    for number in (1, 2):
        run(form, model, batch_of(0))
        assert loss.count == number
    assert (stand_in.num_captures, stand_in.num_replays) == (1, 2)


def test_a_buffer_that_a_model_replaces_is_found() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y - self.mean

    model = Moves()
    before = model.mean
    assert lint_of(model, batch_of(0)[0]).findings
    assert model.mean is before


def test_a_model_that_calls_itself_is_captured_once() -> None:
    class Nested(Net):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
            return self(x, scale=1.0) if scale != 1.0 else super().forward(x)

    form, stand_in, _ = make(Nested())
    model = form._model
    wanted = loss_fn(model, batch_of(0)).detach()
    model.norm.reset_running_stats()
    torch.testing.assert_close(run(form, model, batch_of(0)), wanted)
    assert stand_in.num_captures == 1


@pytest.mark.parametrize(
    ("execution", "runs"), [("compiled", True), ("compiled+model-graph", False)]
)
def test_the_check_lets_no_count_start_over_for_what_bakes_it_in(
    execution: Any, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is guarded does in Python what the eager step does; a replayed model does not."""
    asked: list[bool] = []

    def check(*_: Any, runs_python: bool, **__: Any) -> None:
        asked.append(runs_python)

    monkeypatch.setattr(checked, "check_replay", check)
    model, device = Net(), torch.device("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    body = StepBody(model, loss_fn, optimizer, Plan(), None, clip_norm=None, device=device)
    body.plan = Plan(execution=execution)
    runner = checked.CheckedRunner(body, Recorder(HostClock()), World(0, 1, 0, device), [])
    runner(batch_of(0))
    assert asked == [runs]


@pytest.mark.parametrize("execution", ["model-graph", "compiled+model-graph"])
def test_plans_that_cannot_be_honoured_are_refused(execution: Any) -> None:
    with pytest.raises(PlanError, match=r"got 2 in the plan; its gradients are overwritten"):
        check_plan(Plan(execution=execution, accumulate=2), "cuda")
    with pytest.raises(PlanError, match=r"this release replays the model alone on one worker"):
        check_plan(Plan(execution=execution, workers=2), "cuda")
    with pytest.raises(PlanError, match=r"a training step on cpu"):
        check_plan(Plan(execution=execution), "cpu")
