"""What a step as one program has to notice between steps: after any change it trains like the eager step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from step_pairs import adamw, batch_of, make, pair_of
from torch import Tensor, nn

from ridgeline.errors import CaptureError, EquivalenceError
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step import runner as step_graph
from ridgeline.runtime.steps.whole_step.program import StepProgram
from ridgeline.runtime.steps.whole_step.saved import saving

pytestmark = pytest.mark.usefixtures("interpreted")


def first(step: PlannedStep) -> Any:
    """The first layer."""
    return step.model.get_submodule("0")


def group(step: PlannedStep) -> dict[str, Any]:
    return step.optimizer.param_groups[0]


def frozen_first() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(requires_grad=False)
    return model


def test_gradual_unfreezing_goes_on() -> None:
    """A layer released later has no optimizer state yet; an eager step makes it, then compiling goes on."""
    with pair_of(frozen_first, adamw) as pair:
        pair.train(8, {3: lambda step: first(step).requires_grad_(requires_grad=True)})
        assert pair.counters()["recaptures"] == 1
        assert pair.program._runner._prepared


def test_momentum_switched_on_later_goes_on() -> None:
    """Its buffers do not exist before; the step after the change makes them."""

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    with pair_of(optimizer=plain) as pair:
        pair.train(8, {3: lambda step: group(step).update(momentum=0.9)})
        assert pair.program._runner._prepared


def zeros_in_new_tensors(step: PlannedStep) -> None:
    state = step.optimizer.state
    for parameter in list(state):
        state[parameter] = {key: torch.zeros_like(value) for key, value in state[parameter].items()}


def zeros_in_the_same_dict(step: PlannedStep) -> None:
    for values in step.optimizer.state.values():
        values.update({key: torch.zeros_like(value) for key, value in values.items()})


def test_optimizer_state_reset_in_place_is_seen() -> None:
    """Cleared, it is made anew by an eager step; new tensors of the same shapes are taken over."""
    changes = {
        3: lambda step: step.optimizer.state.clear(),
        6: zeros_in_new_tensors,
        8: zeros_in_the_same_dict,
    }
    with pair_of(optimizer=adamw) as pair:
        pair.train(10, changes)
        assert pair.counters()["recaptures"] == 1


class Widening(nn.Module):
    """Takes batches into the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


def test_optimizer_state_loaded_into_a_model_of_another_dtype_is_seen() -> None:
    """`model.double()` leaves the state in float32; loading it again gives it the dtype of the weights."""

    def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), 0.01)

    changes = {
        2: lambda step: step.model.double(),
        5: lambda step: step.optimizer.load_state_dict(step.optimizer.state_dict()),
    }
    with pair_of(Widening, rmsprop) as pair:
        pair.train(8, changes)
        for step in pair:
            assert {s["square_avg"].dtype for s in step.optimizer.state.values()} == {torch.float64}
        assert pair.program._runner._prepared


class Averaging(nn.Module):
    """Keeps an average of its inputs in a buffer that it assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return x - self.average


def test_buffers_that_forward_assigns_anew_go_on() -> None:
    """Eager steps put new tensors into the model; the program goes on from their values, in its own."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Averaging(), nn.Linear(6, 3))

    with pair_of(model) as pair:
        pair.train(5, {})
        pair.run(5, 5)
        pair.run(6)
        averages = [step.model.get_buffer("0.average") for step in pair]
        torch.testing.assert_close(*averages)
        assert "recaptures" not in pair.counters()


class Scaling(nn.Module):
    """Scales its inputs by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.rand(6, 6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[1] + self.scales.mean()


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("strides", [(1, 6), (6, 0), (0, 1)])
def test_buffers_that_lie_otherwise_stay_so(strides: tuple[int, int], is_elsewhere: bool) -> None:
    """Turned or expanded, in the memory of before or another: code that looks at their strides finds them."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Scaling(), nn.Linear(6, 3))

    def turn(step: PlannedStep) -> None:
        before = step.model.get_buffer("0.scales")
        before = before.clone() if is_elsewhere else before
        step.model[0].scales = before.as_strided((6, 6), strides)

    with pair_of(model) as pair:
        pair.train(7, {4: turn})
        for step in pair:
            assert step.model.get_buffer("0.scales").stride() == strides
        assert pair.counters()["recaptures"] == 1


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3))


def assign(step: PlannedStep) -> None:
    """Other weights under the same names, in the model and in the optimizer."""
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in step.model.state_dict().items()
    }
    step.model.load_state_dict(state, assign=True)
    group(step)["params"][:] = step.model.parameters()


def test_assigned_weights_are_trained() -> None:
    """`load_state_dict(assign=True)` puts new parameters into the model: the program is not theirs."""
    with pair_of(linear) as pair:
        pair.train(7, {3: assign})
        assert pair.counters()["recaptures"] == 1


@pytest.fixture
def saved_state(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a save would write, without compiling it: the program, and a copy of its state."""
    saved: dict[str, Any] = {}

    def keep(path: Path, program: StepProgram, *, file: Any = None) -> Path:
        saved["state"] = {entry.name: entry.tensor.clone() for entry in program.state}
        saved["next loss"] = program.run(list(batch_of(9).values()))
        saved["trained"] = {e.name: e.tensor.clone() for e in program.state}
        return path

    monkeypatch.setattr(step_graph, "save_step", keep)
    monkeypatch.setattr(saving, "save_step", keep)
    return saved


CHANGES = {
    "weight_decay": lambda step: group(step).update(weight_decay=0.9),
    "optimizer state": zeros_in_new_tensors,
    "data": lambda step: setattr(first(step).weight, "data", torch.ones(8, 6)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_saved_is_the_present_state(name: str, saved_state: dict[str, Any]) -> None:
    """After a change since the last step, the saved program trains as the eager step does."""
    with pair_of(lambda: make(dropout=0.0), adamw) as pair:
        pair.train(4, {})
        pair.both(CHANGES[name])
        pair.program.save("step.pt2", batch_of(0))
        wanted = pair.eager(batch_of(9))
        torch.testing.assert_close(saved_state["next loss"], wanted)
        for key, parameter in pair.eager.model.named_parameters():
            torch.testing.assert_close(saved_state["trained"][key], parameter.detach())


def test_assigned_weights_need_a_step_before_they_are_saved(saved_state: dict[str, Any]) -> None:
    """The optimizer has no state for them yet; after one step they can be saved."""
    with pair_of(linear, adamw) as pair:
        pair.train(4, {})
        pair.both(assign)
        with pytest.raises(CaptureError, match="run one eager step first"):
            pair.program.save("step.pt2", batch_of(0))
        pair.run(4)
        pair.program.save("step.pt2", batch_of(0))
        weight = pair.eager.model.get_parameter("0.weight").detach()
        torch.testing.assert_close(saved_state["state"]["0.weight"], weight)


class Spectrum(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize("is_wrong", [False, True])
def test_complex_parameters_are_checked_in_full(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is wrong in the imaginary part only is refused; a right one trains."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Spectrum()

    def conjugating(program: StepProgram, _notes: list[str]) -> Any:
        def call(flat: list[Tensor]) -> Any:
            with torch.no_grad():
                loss = program.graph(*flat)
                flat[0].imag.mul_(1.1)
                return loss

        return call

    if is_wrong:
        monkeypatch.setattr(step_graph, "compile_graph", conjugating)
    with pair_of(model) as pair:
        if is_wrong:
            pair.run(0)
            with pytest.raises(EquivalenceError):
                pair.program(batch_of(1))
        else:
            pair.train(5, {})
