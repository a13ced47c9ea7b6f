"""When a captured step is dropped and captured again, with a capture that records nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_stand_ins import Captured, install
from torch import nn

from ridgeline.errors import ObstacleError
from ridgeline.optimizers.capturable import WatchedSettings
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs import graph
from ridgeline.runtime.steps.graphs.graph import GraphRunner
from ridgeline.workers.world import World


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the runner does, with stand-ins for CUDA."""
    done: list[str] = []
    install(monkeypatch.setattr, done)
    return done


def make_runner(
    model: nn.Module, optimizer: torch.optim.Optimizer, workers: int = 1
) -> tuple[GraphRunner, Recorder, list[str]]:
    cpu = torch.device("cpu")
    body = StepBody(
        model,
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer,
        Plan(execution="graph"),
        None,
        clip_norm=None,
        device=cpu,
    )
    recorder, notes = Recorder(HostClock()), list[str]()
    return GraphRunner(body, recorder, World(0, workers, 0, cpu), notes), recorder, notes


def freeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(False)


def evaluate(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[1].eval()


def put_another(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[1] = nn.Tanh()


def put_weight(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight = nn.Parameter(torch.ones(4, 4))


def set_momentum(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9


def add_group(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.2})


def drop_parameter(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def clear_state(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def add_hook(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (freeze, "parameters were frozen or released"),
        (evaluate, "a training flag changed"),
        (put_another, "a module was replaced"),
        (put_weight, "a parameter was replaced"),
        (set_momentum, "an optimizer setting changed"),
        (add_group, "a module was replaced"),
        (drop_parameter, "the optimizer got or lost parameters"),
        (clear_state, "optimizer state was replaced"),
        (add_hook, "hooks were added or removed"),
    ],
)
def test_what_changes_the_step_is_captured_again(
    change: Callable[[nn.Sequential, torch.optim.Optimizer], None], why: str, log: list[str]
) -> None:
    """After one eager step, which makes what optimizer state is new; the note says why."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    runner, recorder, notes = make_runner(model, optimizer)
    batch = (torch.ones(2, 4),)
    for _ in range(5):
        runner(batch)
    usual = ["eager"] * 3 + ["capture", "replay", "replay"]
    assert log == usual
    change(model, optimizer)
    for _ in range(3):
        runner(batch)
    assert log == [*usual, "synchronize", "close", "eager", "capture", "replay", "replay"]
    assert recorder.counts["recaptures"] == 1
    assert [note for note in notes if note.startswith("captured")] == [
        f"captured again because {why}"
    ]
    optimizer.param_groups[0]["lr"] = 0.05
    runner(batch)
    assert log[-1] == "replay", "a learning rate is no constant"
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
    runner.close()


def test_a_hook_on_an_accumulated_gradient_that_comes_later_is_refused(log: list[str]) -> None:
    """The next step is eager and calls it; no replay would."""
    model = nn.Sequential(nn.Linear(4, 4))
    runner, _, _ = make_runner(model, torch.optim.SGD(model.parameters(), 0.1))
    batch, calls = (torch.ones(2, 4),), list[int]()
    for _ in range(5):
        runner(batch)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    runner(batch)
    assert calls == [1]
    with pytest.raises(ObstacleError, match="without hooks on their gradients"):
        runner(batch)
    runner.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_module_of_torchscript_is_refused_before_the_first_step(log: list[str]) -> None:
    """What it holds could be replaced, and no replay would notice."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 1)))
    runner, _, _ = make_runner(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ObstacleError, match="got one of TorchScript in '1', whose parameters"):
        runner((torch.ones(2, 4),))
    assert log == []
    runner.close()


def test_a_short_replay_is_captured_without_stamps(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames are those of the graph that was checked first, and which is dropped."""
    monkeypatch.setattr(Captured, "replay_ns", graph.SHORT_NS - 1)
    model = nn.Sequential(nn.Linear(4, 4))
    runner, recorder, _ = make_runner(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(6):
        runner((torch.ones(2, 4),))
    captured = ["capture", "close", "capture without stamps"]
    assert log == ["eager"] * 3 + captured + ["replay"] * 3
    assert [span.name for spans in recorder._frames for span in spans] == ["forward"]
    runner.close()


@pytest.mark.parametrize(("workers", "replay_ns"), [(1, graph.SHORT_NS), (2, 1)])
def test_other_replays_keep_their_stamps(
    workers: int, replay_ns: int, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are long enough, and those of several workers, which would have to agree."""
    monkeypatch.setattr(Captured, "replay_ns", replay_ns)
    model = nn.Sequential(nn.Linear(4, 4))
    runner, _, _ = make_runner(model, torch.optim.SGD(model.parameters(), 0.1), workers)
    for _ in range(4):
        runner((torch.ones(2, 4),))
    assert log == ["eager"] * 3 + ["capture", "replay"]
    runner.close()


def test_a_setting_in_a_list_is_watched_by_value(log: list[str]) -> None:
    """A list may change while it stays the same object; the other settings are told by identity."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = WatchedSettings(optimizer)
    assert not settings.changed()
    optimizer.param_groups[0]["momentum"] = float("0.0")  # another object of the same value
    assert not settings.changed()
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    assert settings.changed()
    settings = WatchedSettings(optimizer)
    assert not settings.changed()
    optimizer.param_groups[0]["betas"][0] = 0.8
    assert settings.changed()


class Signs(torch.optim.Optimizer):
    """A step of the user's own, with a learning rate that is a Python number."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def test_an_optimizer_that_no_graph_can_hold_stays_outside(log: list[str]) -> None:
    """It is left as it is, what it reads is no reason to capture again, and a note names it."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = Signs(model.parameters(), 0.1)
    runner, recorder, notes = make_runner(model, optimizer)
    batch = (torch.ones(2, 4),)
    for _ in range(4):
        runner(batch)
    usual = ["eager"] * 3 + ["capture without optimizer", "replay"]
    assert log == usual
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.param_groups[0]["foo"] = 1
    runner(batch)
    assert log == [*usual, "replay"]
    assert "the optimizer Signs steps outside of the graph: no graph can hold it" in notes
    assert recorder.counts.get("recaptures", 0) == 0
    runner.close()
