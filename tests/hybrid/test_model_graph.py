"""Steps whose model is replayed while the loss runs as it was written, with a stand-in for the captures."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from replayed_models import Net, batch_of, loss_fn, make, run
from torch import Tensor, nn

from ridgeline.errors import ObstacleError, PlanError
from ridgeline.execution import check_plan
from ridgeline.model_graphs.form import OTHER_CALLS
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs import checked
from ridgeline.workers.world import World


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
            target = model(batch[0], scale=2.0)["scores"]
        return (
            loss_fn(model, batch) + (model(batch[0], scale=2.0)["scores"] - target).square().mean()
        )

    torch.manual_seed(0)
    model = Net()
    form, stand_in, _ = make(model, twice)
    losses = [run(form, model, batch_of(seed)) for seed in range(2)]
    assert stand_in.num_replays == 2
    torch.manual_seed(0)
    again = Net()
    wanted = [twice(again, batch_of(seed)).detach() for seed in range(2)]
    torch.testing.assert_close(losses, wanted, rtol=0, atol=0)


class Weighed(nn.Module):
    """Takes an array of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor, weights: numpy.ndarray) -> Tensor:
        return self.out(x) * float(weights.sum())


def test_arrays_are_compared_by_their_elements() -> None:
    """A replay has those that it was captured with: the comparison of two arrays is no answer."""
    weights = numpy.array([1.0, 2.0])

    def weighed(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0], weights.copy()).square().mean()

    torch.manual_seed(0)
    model = Weighed()
    form, stand_in, notes = make(model, weighed)
    losses = [run(form, model, batch_of(0)) for _ in range(2)]
    assert (stand_in.num_captures, stand_in.num_replays, notes) == (1, 2, [])
    weights *= 2.0
    losses.append(run(form, model, batch_of(0)))
    assert (stand_in.num_captures, stand_in.num_replays, notes) == (1, 2, [OTHER_CALLS])
    torch.testing.assert_close(losses, [losses[0], losses[0], 4.0 * losses[0]])


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


SCALE = 2.0


class Reading(nn.Module):
    """Reads a global, an attribute of a plain object and a layout besides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.options = nn.Linear(6, 3), SimpleNamespace(shift=1.0)

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        by = scale if x.is_contiguous() else -scale
        return {"scores": self.out(x) * by * SCALE + self.options.shift}


def test_a_change_of_what_the_model_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In globals, plain objects and inputs that lie otherwise; a replay would compute with what was."""
    model = Reading()
    form, stand_in, notes = make(model)
    for _ in range(2):
        run(form, model, batch_of(0))
    assert (stand_in.num_captures, stand_in.num_replays) == (1, 2)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    run(form, model, batch_of(0))
    model.options.shift = -1.0
    run(form, model, batch_of(0))
    assert (stand_in.num_captures, stand_in.num_replays, notes) == (3, 4, [])
    x, y = batch_of(0)
    run(form, model, (x.t().contiguous().t(), y))
    assert (stand_in.num_captures, stand_in.num_replays, notes) == (3, 4, [OTHER_CALLS])


def test_a_loss_that_never_calls_the_model_is_refused() -> None:
    def parts(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model.out(model.hidden(batch[0])), batch[1])

    form, _, _ = make(Net(), parts)
    with pytest.raises(ObstacleError, match="never calls Net itself"):
        run(form, form._model, batch_of(0))


def test_a_result_that_is_no_tensor_is_refused() -> None:
    class Odd(Net):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
            return {"scores": self.hidden(x), "odd": Outcome(x, "inside")}

    form, _, _ = make(Odd())
    with pytest.raises(
        ObstacleError, match=r"results of Odd in tuples, lists, dicts or a dataclass, got Outcome"
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
