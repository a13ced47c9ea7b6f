"""What cuDNN's recurrent layers draw from is held by whoever captures them."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.capture import dropout_states
from ridgeline.capture.dropout_states import (
    SEEDED,
    DropoutStates,
    DropoutStateSeen,
    HeldState,
    left_as_found,
)
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs import captured_step
from ridgeline.runtime.steps.graphs.captured_step import CapturedStep
from ridgeline.runtime.steps.step import PlannedStep

META: dict[str, Any] = {"device": "meta"}


def test_the_state_of_a_recurrent_layer_is_seen() -> None:
    """That of its last call; other operators have none."""
    x, states = torch.zeros(1, 1, 1, **META), [torch.zeros(8, **META) for _ in range(2)]
    weights = [torch.zeros(4, 1, **META) for _ in range(2)]
    with DropoutStateSeen() as seen:
        assert x.add(x) is not None
        assert seen.state is None
        for state in states:
            sizes = (2, 1, 0, 1, False, 0.5, True, False, [])
            torch.ops.aten._cudnn_rnn.default(x, weights, 2, None, x, x, *sizes, state)
    assert seen.state is states[1]


@pytest.mark.parametrize(
    ("device", "dropout", "training", "count"),
    [
        ("cuda:0", 0.5, True, 1),
        ("cuda:0", 0.0, True, 0),
        ("cuda:0", 0.5, False, 0),
        ("cpu", 0.5, True, 0),
    ],
)
def test_states_are_those_of_layers_that_drop(
    monkeypatch: pytest.MonkeyPatch, device: str, dropout: float, training: bool, count: int
) -> None:
    """One for each GPU, however many layers it has, deep inside a model; none for those that drop nothing."""
    monkeypatch.setattr(dropout_states, "dropout_state", str)
    monkeypatch.setattr(dropout_states, "_place", lambda _: (0, 0))
    place = torch.device(device)
    weight = SimpleNamespace(is_cuda=place.type == "cuda", device=place)
    layers = [nn.GRU(2, 2, 2, dropout=dropout) for _ in range(2)]
    monkeypatch.setattr(nn.GRU, "parameters", lambda _: [weight, weight])
    model = nn.Sequential(nn.ModuleDict({"inner": nn.Sequential(*layers)}), nn.ReLU())
    model.train(training)
    held = DropoutStates(model.modules()).held
    assert [one.state for one in held] == ["cuda:0"] * count


def test_a_captured_step_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for before the capture begins, also those of networks that only the loss reaches."""
    order: list[Any] = []
    teacher = nn.LSTM(1, 1)

    def states(modules: list[nn.Module]) -> str:
        order.append({type(module) for module in modules})
        return "the states"

    @contextlib.contextmanager
    def capturing(*_: object, **__: object) -> Iterator[None]:
        order.append("capture")
        yield

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() + teacher(batch)[0].sum()

    monkeypatch.setattr(captured_step, "DropoutStates", states)
    monkeypatch.setattr(captured_step, "capturing", capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    model = nn.Linear(1, 1)
    body = StepBody(
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), 0.1),
        Plan(),
        None,
        clip_norm=None,
        device=torch.device("cpu"),
    )
    stream: Any = None
    step: Any = CapturedStep(body, torch.ones(1, 1), stream, None, has_stamps=False)
    assert order == [{nn.Linear, nn.LSTM}, "capture"]
    assert step.dropout == "the states"


class TorchsLayers:
    """A GPU's generator, and layers that draw from a state which seeding has the next of them make anew."""

    def __init__(self) -> None:
        self.seed, self.offset, self._is_set = 0, 0, True

    def place(self, _: torch.device) -> tuple[int, int]:
        return self.seed, self.offset

    def seeded(self, seed: int) -> None:
        self.seed, self.offset, self._is_set = seed, 0, True

    def set_to(self, place: tuple[int, int]) -> None:
        self.seeded(place[0])
        self.offset = place[1]

    def put_back(self, _: torch.device, place: tuple[int, int]) -> None:
        self.seed, self.offset = place

    def state(self, _: torch.device | None = None) -> Tensor:
        if self._is_set:
            self._torchs = torch.tensor([self.seed * 1000 + self.offset])
            self.offset += 4
            self._is_set = False
        return self._torchs

    def draw(self) -> int:
        """What a layer drops out; plain dropout behind it advances the generator."""
        drawn = drawn_from(self.state())
        self.offset += 4
        return drawn


def drawn_from(state: Tensor) -> int:
    return int(state.mul_(31).add_(7).remainder_(10_007))


def held_by(torchs: TorchsLayers, monkeypatch: pytest.MonkeyPatch) -> DropoutStates:
    monkeypatch.setattr(dropout_states, "_place", torchs.place)
    monkeypatch.setattr(dropout_states, "dropout_state", torchs.state)
    states = DropoutStates([])
    state = torchs.state()
    states.held = [HeldState(META["device"], state, state, torchs.place(META["device"]))]
    return states


STEPS = st.lists(st.tuples(st.none() | st.integers(0, 2), st.integers(0, 2)), max_size=8)


@given(steps=STEPS)
def test_replays_draw_what_layers_would(steps: list[tuple[int | None, int]]) -> None:
    """However often generators are seeded, also alike, and whatever runs without a graph in between."""
    with pytest.MonkeyPatch.context() as patch:
        eager, torchs = TorchsLayers(), TorchsLayers()
        states = held_by(torchs, patch)
        eager.state()
        for seed, num_eager in steps:
            if seed is not None:
                eager.seeded(seed)
                torchs.seeded(seed)
            states.bring()
            torchs.offset += 4
            replayed = drawn_from(states.held[0].state)
            states.leave()
            assert replayed == eager.draw()
            assert [torchs.draw() for _ in range(num_eager)] == [
                eager.draw() for _ in range(num_eager)
            ]


def stand_in(torchs: TorchsLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is left as found be a stand-in's."""
    gpu, generators = torch.device("cuda:0"), SimpleNamespace(default_generators=[torchs])
    monkeypatch.setattr(dropout_states, "dropping_devices", lambda _: {gpu})
    monkeypatch.setattr(dropout_states, "_put_back", torchs.put_back)
    monkeypatch.setattr(dropout_states, "torch", SimpleNamespace(cuda=generators))
    monkeypatch.setattr(dropout_states, "_set", lambda _, place: torchs.set_to(place))


def test_a_generator_that_was_seeded_is_found_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step draws first after it is what it would draw, other dropout before its recurrent layers."""
    torchs, untouched = TorchsLayers(), TorchsLayers()
    held_by(torchs, monkeypatch)
    untouched.state()
    stand_in(torchs, monkeypatch)
    for one in (torchs, untouched):
        one.seeded(3)
    with left_as_found(nn.Linear(1, 1)):
        torchs.seeded(5)
        torchs.draw()
    for one in (torchs, untouched):
        one.offset += 8  # other dropout
    assert [torchs.draw() for _ in range(3)] == [untouched.draw() for _ in range(3)]


def test_what_is_left_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever seeds, draws and sets a generator back leaves no trace in what is drawn later, replayed or not."""
    torchs, untouched = TorchsLayers(), TorchsLayers()
    states = held_by(torchs, monkeypatch)
    untouched.state()
    stand_in(torchs, monkeypatch)
    with left_as_found(nn.Linear(1, 1)):
        place = torchs.place(META["device"])
        for seed in (5, 6):
            torchs.seeded(seed)
            states.bring()
            drawn_from(states.held[0].state)
            states.leave()
        torchs.seeded(place[0])
        torchs.offset = place[1]
    states.adopt()
    for _ in range(3):
        states.bring()
        replayed = drawn_from(states.held[0].state)
        torchs.offset += 4
        states.leave()
        assert replayed == untouched.draw()
        assert torchs.draw() == untouched.draw()
    assert torchs.place(META["device"]) == untouched.place(META["device"])


@given(seeds=st.lists(st.none() | st.integers(0, 2), max_size=6))
def test_a_seed_is_known_until_a_replay_or_until_it_is_adopted(seeds: list[int | None]) -> None:
    """Also the one that was there before; what layers draw in between is no seed."""
    with pytest.MonkeyPatch.context() as patch:
        torchs = TorchsLayers()
        states = held_by(torchs, patch)
        for number, seed in enumerate(seeds):
            torchs.draw()
            assert not states.are_seeded()
            if seed is None:
                continue
            torchs.seeded(seed)
            assert states.are_seeded()
            torchs.draw()  # an eager step
            if number % 2:
                states.adopt()
            else:
                states.bring()
                states.leave()


class Seeded:
    """In the place of what a capture holds of recurrent layers: a generator was seeded before one step."""

    held = ("a state",)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_due = False

    def are_seeded(self) -> bool:
        return self.is_due

    def adopt(self) -> None:
        self.calls.append("adopt")
        self.is_due = False

    def bring(self) -> None:
        self.calls.append("bring")

    def leave(self) -> None:
        self.calls.append("leave")


def losses_of(execution: Execution, seeded: Seeded | None = None) -> tuple[list[float], Any]:
    """Ten steps; from the eighth on the states are the stand-in's, and before the ninth a seed is due."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with PlannedStep(
        model, lambda m, b: m(b).square().mean(), optimizer, Plan(execution=execution), device="cpu"
    ) as step:
        for index in range(10):
            if seeded is not None and index == 7:
                step._runner._last.dropout = seeded
            if seeded is not None:
                seeded.is_due = index == 8
            losses.append(float(step(torch.ones(4, 6) + index)))
        return losses, (step.timeline().counters.get("eager_steps", 0), step.notes)


def test_the_step_after_a_seed_runs_without_a_graph() -> None:
    """What recurrent layers drop out begins anew in it, after other draws of the step."""
    seeded = Seeded()
    with emulated_graphs():
        losses, (num_eager, notes) = losses_of("graph", seeded)
    assert num_eager == 1
    assert SEEDED in notes
    assert seeded.calls == ["bring", "leave", "adopt", "bring", "leave"]
    assert losses == pytest.approx(losses_of("eager")[0], rel=1e-5)
