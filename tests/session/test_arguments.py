"""What a script may give to `TrainStep` and `trace`: mistakes are named at once, before anything is measured or moved."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from emulated_graphs import emulated_graphs
from ridgeline.errors import ObstacleError, PlanError, WorkloadError


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def refusal(plan: Any = "auto", **given: Any) -> str:
    model = nn.Linear(2, 1)
    parts: dict[str, Any] = {
        "model": model,
        "loss_fn": loss_of,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    with pytest.raises(PlanError) as caught:
        rl.TrainStep(**(parts | given), plan=plan)
    if given.keys() <= parts.keys():
        with pytest.raises(PlanError) as traced:
            rl.trace(**(parts | given), batch=torch.ones(3, 2))
        assert str(traced.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("plan", ["auto", rl.Plan()])
@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (nn.CrossEntropyLoss(), "CrossEntropyLoss"),
        (nn.functional.cross_entropy, "cross_entropy"),
        (nn.functional.mse_loss, "mse_loss"),
    ],
)
def test_torchs_own_losses_take_something_else(plan: Any, loss_fn: Any, name: str) -> None:
    """They are given outputs and targets, so a script that passes one has more to say."""
    assert refusal(plan, loss_fn=loss_fn) == (
        f"wanted a loss_fn that takes the model and a batch, got {name}, which takes outputs and targets; "
        "write lambda model, batch: criterion(model(batch[0]), batch[1])"
    )


@pytest.mark.parametrize("execution", ["compiled", "model-graph", "graph"])
def test_lazy_modules_have_their_shapes_or_begin_as_they_were_written(execution: Any) -> None:
    """What is compared or captured from the first step on has nothing to begin with; plain steps have."""
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with emulated_graphs(), pytest.raises(PlanError) as caught:
        rl.TrainStep(model, loss_of, optimizer, rl.Plan(execution=execution), device="cpu")
    assert str(caught.value) == (
        f"wanted parameters and buffers that have their shapes for execution={execution!r}, got 0.weight of "
        "a lazy module, which takes them from its first batch; call the model once with an example before, "
        "or use execution='eager'"
    )
    with rl.TrainStep(model, loss_of, optimizer, rl.Plan(), device="cpu") as step:
        assert torch.isfinite(step(torch.ones(3, 2)))


class Numbered(nn.Linear):
    """Its step takes the number of the batch, as PyTorch Lightning calls it."""

    def training_step(self, batch, index):  # type: ignore[no-untyped-def]
        return self(batch).mean() * index


@pytest.mark.parametrize("plan", ["auto", rl.Plan()])
def test_a_function_of_something_else_is_refused_with_what_it_takes(plan: Any) -> None:
    """Its first call would fail in the midst of a choice."""
    assert refusal(plan, loss_fn=Numbered.training_step) == (
        "wanted a loss_fn that takes the model and a batch, got training_step(self, batch, index); write a "
        "function of both that calls it, such as lambda model, batch: model.training_step(batch, 0) for a "
        "method of the model that takes the batch and its number"
    )


@pytest.mark.parametrize(
    "loss_fn", [max, lambda *parts: parts, lambda model, batch, scale=1: batch]
)
def test_what_takes_two_arguments_or_does_not_say_is_taken(loss_fn: Any) -> None:
    """A function written in C may have no signature."""
    model = nn.Linear(2, 1)
    rl.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1)).close()


@pytest.mark.parametrize(
    ("hold", "place"), [(lambda one: {"optimizer": one}, "'optimizer'"), (lambda one: [one], "0")]
)
def test_what_holds_an_optimizer_is_refused_with_its_place(hold: Any, place: str) -> None:
    """`configure_optimizers` returns such values."""
    model = nn.Linear(2, 1)
    held = hold(torch.optim.SGD(model.parameters(), 0.1))
    assert refusal(model=model, optimizer=held) == (
        f"wanted a torch.optim.Optimizer, got {type(held).__name__}; give the one in its entry {place}, and "
        "call whatever else it does (setting learning rates, say) before or after each step"
    )


@pytest.mark.parametrize("plan", ["auto", rl.Plan()])
@pytest.mark.parametrize("is_detached", [False, True])
def test_a_loss_that_calls_backward_itself_is_refused(plan: Any, is_detached: bool) -> None:
    """Loops of others have all of a step in one function; torch's error says what a loop would do."""

    def whole_step(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach() if is_detached else loss

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said: list[str] = []
    with (
        rl.TrainStep(model, whole_step, optimizer, plan, seconds=1, progress=said.append) as step,
        pytest.raises(WorkloadError) as caught,
    ):
        step(torch.ones(3, 2))
    assert str(caught.value) == (
        "wanted a loss_fn that returns the loss with its graph, got one that calls backward itself; leave "
        "backward(), step() and zero_grad() out of it: the training step does them (a part of the loss may "
        "go backward there, if the rest is returned)"
    )


def test_a_part_of_a_loss_may_go_backward_in_it() -> None:
    """Gradients of both parts add up, as in a loop."""
    whole, parted = nn.Linear(2, 1), nn.Linear(2, 1)
    parted.load_state_dict(whole.state_dict())

    def in_parts(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch[:1]).sum().backward()
        return model(batch[1:]).sum()

    for model, loss in ((whole, lambda model, batch: model(batch).sum()), (parted, in_parts)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with rl.TrainStep(model, loss, optimizer, rl.Plan()) as step:
            step(torch.ones(2, 2))
    assert torch.equal(whole.weight, parted.weight)


def test_a_state_that_was_not_detached_has_torchs_message() -> None:
    """Nothing went backward in the loss itself."""
    kept = [torch.zeros(1)]

    def recurrent(model: nn.Module, batch: Tensor) -> Tensor:
        kept[0] = (model(batch) * kept[0]).exp()
        return kept[0].mean()

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        rl.TrainStep(model, recurrent, optimizer, rl.Plan()) as step,
        pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"),
    ):
        [step(torch.ones(3, 2)) for _ in range(2)]


def test_a_criterion_of_ones_own_is_taken() -> None:
    """A module that takes the model and a batch is a loss like any function."""

    class Criterion(nn.MSELoss):
        def forward(self, model: Any, batch: Any) -> Tensor:
            return super().forward(model(batch), batch[:, :1])

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rl.TrainStep(model, Criterion(), optimizer, rl.Plan()) as step:
        assert step(torch.ones(3, 2)).item() >= 0.0


@pytest.mark.parametrize("plan", ["auto", rl.Plan()])
def test_what_cannot_be_trained_is_named(plan: Any) -> None:
    """A function for a model, or nothing for a loss."""
    assert refusal(plan, model=loss_of) == (
        "wanted a torch.nn.Module as model, got loss_of; put what it does into the forward of a module that "
        "holds its parameters"
    )
    assert refusal(plan, loss_fn=None) == (
        "wanted a loss_fn that takes the model and a batch, got NoneType; write one, such as "
        "lambda model, batch: model(batch).mean()"
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("plan", [rl.Plan(), rl.Plan(execution="compiled")])
def test_a_module_of_torchscript_trains_as_a_loop_trains_it(plan: rl.Plan) -> None:
    """Where nothing of it has to be watched."""
    losses = []
    for scripted in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        model = torch.jit.script(model) if scripted else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with rl.TrainStep(model, loss_of, optimizer, plan if scripted else rl.Plan()) as step:
            losses.append([step(torch.ones(3, 2)).item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_module_of_torchscript_is_refused_where_it_has_to_be_watched() -> None:
    """By name, where the first program would be made."""
    model = nn.Sequential(nn.Linear(2, 4), torch.jit.script(nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        rl.TrainStep(model, loss_of, optimizer, rl.Plan(execution="step-graph")) as step,
        pytest.raises(ObstacleError) as caught,
    ):
        [step(torch.ones(3, 2)) for _ in range(3)]
    assert str(caught.value) == (
        "wanted modules of Python, got one of TorchScript in '1', whose parameters cannot be watched; give "
        "the module that it was made from, or use execution='compiled' or 'eager'"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"allow": "bf16"},
            "wanted allow to be a collection of names, got 'bf16'; give allow=('bf16',)",
        ),
        (
            {"allow": ("bfloat16",)},
            (
                "wanted allow to name changes of the maths out of tf32, bf16, random, compression, "
                "local-steps, got 'bfloat16'; leave it out"
            ),
        ),
        (
            {"allow": 3},
            "wanted allow to be a collection of names, got 3; give allow=('bf16',)",
        ),
        (
            {"machine": "machine.json"},
            (
                "wanted machine as Machine or None, got 'machine.json' in ridgeline.TrainStep(); for a "
                "file give rl.Machine.load(path)"
            ),
        ),
        ({"steps": 10.5}, "wanted steps as a whole number from 1, or None, got 10.5"),
        ({"steps": 0}, "wanted steps as a whole number from 1, or None, got 0"),
        ({"steps": True}, "wanted steps as a whole number from 1, or None, got True"),
        (
            {"progress": False},
            (
                "wanted progress as a function or None, got False in ridgeline.TrainStep(); "
                "help(ridgeline.TrainStep) says what each argument is"
            ),
        ),
    ],
)
def test_how_to_choose_is_checked_before_the_choice(given: dict[str, Any], message: str) -> None:
    """A choice may take minutes, which a wrong word would waste."""
    assert refusal(**given) == message


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(copied: Callable[[Any], Any]) -> None:
    """Nor is what holds one: a copy would train the same model."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rl.TrainStep(model, loss_of, optimizer, plan=rl.Plan()) as step:
        step(torch.ones(3, 2))
        with pytest.raises(
            PlanError, match=r"something to copy or pickle, got a TrainStep, .* state_dict\(\)"
        ):
            copied([step])


def test_a_step_is_described_in_inference_mode() -> None:
    """As it trains, which is outside of that."""
    model = nn.Linear(2, 1)
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), torch.ones(3, 2)
    wanted = rl.trace(model, loss_of, optimizer, batch)
    with torch.inference_mode():
        assert rl.trace(model, loss_of, optimizer, batch) == wanted


def test_a_step_with_an_operator_that_takes_functions() -> None:
    """Torch compiles those where they run, and not where somebody watches: they are refused by name."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        y = model(batch)
        return torch.cond(y.sum() > 0, lambda y: y.mean(), lambda y: y.abs().mean(), (y,))

    model, batch = nn.Linear(2, 1), torch.ones(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    words = "got one that takes functions, such as torch.cond"
    for may_run in (False, True):
        with pytest.raises(WorkloadError, match=words):
            rl.trace(model, loss, optimizer, batch, may_run=may_run)
    with (
        emulated_graphs(),
        rl.TrainStep(model, loss, optimizer, plan=rl.Plan(execution="graph")) as step,
        pytest.raises(ObstacleError, match=words),
    ):
        step(batch)
