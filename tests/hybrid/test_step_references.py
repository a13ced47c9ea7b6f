"""What a program takes for granted besides tensors of the model: modules, other networks, autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_pairs import Pair, adamw, batch_of, loss_fn, make, pair_of, sgd
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ridgeline.guards.reading import UnreadableError, read_program
from ridgeline.plan import Plan
from ridgeline.programs.compiling import CompiledForms
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.usefixtures("interpreted")

REASONS = ("no longer holds", "a tensor that it reads was replaced")


def test_a_module_that_is_replaced_is_seen() -> None:
    """An activation has no tensors, yet it is another program."""
    with pair_of() as pair:
        pair.train(7, {3: lambda step: step.model.__setitem__(2, nn.Tanh())})
        assert "compiled again because a module was replaced" in pair.program.notes


def teacher(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 3), nn.Tanh())


class Distilled:
    """A loss against a teacher, which hangs in one of several places."""

    def __init__(self) -> None:
        self.teacher = teacher(1)
        self.teachers = [teacher(1)]
        self.named = {"teacher": teacher(1)}
        self.scale = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        wanted = self.teacher(batch["x"]) + self.teachers[0](batch["x"])
        wanted = wanted + self.named["teacher"](batch["x"])
        return self.scale * nn.functional.mse_loss(model(batch["x"]), wanted.detach())


def closure_of(distilled: Distilled) -> Callable[[nn.Module, Any], Tensor]:
    network, networks = distilled.teacher, distilled.teachers

    def loss(model: nn.Module, batch: Any) -> Tensor:
        wanted = network(batch["x"]) + networks[0](batch["x"])
        return nn.functional.mse_loss(model(batch["x"]), wanted.detach())

    def rebind(other: nn.Module) -> None:
        nonlocal network
        network = other

    loss.rebind = rebind  # type: ignore[attr-defined]
    return loss


def loss_of(step: PlannedStep) -> Any:
    return step._body.loss_fn


def data_replaced(step: PlannedStep) -> None:
    for parameter in loss_of(step).teacher.parameters():
        parameter.data = parameter.data * 0.5


def in_place(step: PlannedStep) -> None:
    with torch.no_grad():
        for parameter in loss_of(step).teacher.parameters():
            parameter.mul_(0.5)


SEEN: dict[str, Callable[[PlannedStep], Any]] = {
    "attribute": lambda step: setattr(loss_of(step), "teacher", teacher(2)),
    "list": lambda step: loss_of(step).teachers.__setitem__(0, teacher(2)),
    "dict": lambda step: loss_of(step).named.update(teacher=teacher(2)),
    "data": data_replaced,
    "number": lambda step: setattr(loss_of(step), "scale", 3.0),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_the_loss_reads_may_be_replaced(name: str) -> None:
    """Another teacher, other tensors in it, another number: the program is compiled again."""
    with pair_of(optimizer=sgd, loss=Distilled) as pair:
        pair.train(7, {3: SEEN[name]})
        notes = [note for note in pair.program.notes if note.startswith("compiled again because ")]
        assert any(reason in note for note in notes for reason in REASONS)
        assert pair.counters()["recaptures"] == 1


def test_parts_of_other_networks_may_be_replaced() -> None:
    """A module or a hook inside of the teacher is noticed like one of the model."""
    changes = {
        3: lambda step: loss_of(step).teacher.__setitem__(1, nn.ReLU()),
        6: lambda step: loss_of(step).teacher[0].register_forward_hook(lambda *a: a[2] * 2),
    }
    with pair_of(loss=Distilled) as pair:
        pair.train(9, changes)
        assert pair.counters()["recaptures"] == 2


def test_what_changes_in_place_needs_no_other_program() -> None:
    """The values of other tensors are read anew by every step."""
    with pair_of(loss=Distilled) as pair:
        pair.train(6, {3: in_place})
        assert "recaptures" not in pair.counters()


def test_closures_are_watched() -> None:
    """A variable bound to another network, and an entry of a list."""
    changes = {
        3: lambda step: loss_of(step).rebind(teacher(2)),
        6: lambda step: loss_of(step).__closure__[1].cell_contents.__setitem__(0, teacher(3)),
    }
    with pair_of(loss=lambda: closure_of(Distilled())) as pair:
        pair.train(9, changes)
        assert pair.counters()["recaptures"] == 2


def test_what_the_compiler_cannot_read_is_refused_with_its_line() -> None:
    """Nobody could say when a program of it would have to be compiled again."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        results = model(batch["x"])
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(results, batch["y"])

    message = (
        r"wanted a program that torch's compiler can read in one piece, got .* \(test_step_references.py:\d+ "
        r"in loss\); use execution='compiled', which leaves that to Python, or 'eager'$"
    )
    with pair_of(loss=lambda: loss) as pair, pytest.raises(UnreadableError, match=message):
        pair.train(4, {})


def test_a_batch_for_which_the_code_cannot_be_read_runs_as_written() -> None:
    """Training goes on: what the compiler has read so far serves the others."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not batch["x"].is_contiguous():
            torch._dynamo.graph_break()
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    with pair_of(loss=lambda: loss) as pair:
        pair.train(4, {})
        for index in range(12):
            batch = batch_of(index, 8)
            if index % 2:
                batch["x"] = batch["x"].t().contiguous().t()
            losses = []
            for step in pair:
                torch.manual_seed(index)
                losses.append(step(batch))
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        assert pair.counters()["eager_steps"] == 6
        assert "recaptures" not in pair.counters()


def test_what_the_compiler_cannot_differentiate_is_not_sent_to_it() -> None:
    """A penalty on gradients: forms that are compiled would refuse the step in their turn."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        points = batch["x"].clone().requires_grad_(True)
        results = model(points)
        (slope,) = torch.autograd.grad(results.sum(), points, create_graph=True)
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(results, batch["y"]) + slope.square().sum()

    message = (
        r"in one piece, got .* \(test_step_references.py:\d+ in loss\); use execution='eager'$"
    )
    with pair_of(loss=lambda: loss) as pair, pytest.raises(UnreadableError, match=message):
        pair.train(4, {})


class Passing(TorchFunctionMode):
    """Calls each function as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_loss_under_a_mode_of_its_own_is_one_program() -> None:
    """To the compiler, entering one writes the stack of modes; behind the `with` that is as it was."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with Passing():
            results = model(batch["x"])
        return nn.functional.cross_entropy(results, batch["y"])

    with pair_of(loss=lambda: loss) as pair:
        pair.train(6, {})
        assert pair.counters().get("recaptures", 0) == 0


PASSING = Passing()


def test_parameters_that_are_exchanged_for_a_call_are_no_write() -> None:
    """The inner step of meta-learning calls the model with others, and puts its own back."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        others = {name: p * 0.9 for name, p in model.named_parameters()}
        results = torch.func.functional_call(model, others, (batch["x"],))
        return nn.functional.cross_entropy(results, batch["y"])

    with pair_of(loss=lambda: loss) as pair:
        pair.train(6, {})
        assert pair.counters().get("recaptures", 0) == 0


def replaced(entries: dict[str, Tensor], x: Tensor) -> Tensor:
    before = entries["a"]
    entries["a"] = x
    entries["b"] = before
    return x + 1


def put_back(entries: dict[str, Tensor], x: Tensor) -> Tensor:
    before = entries["a"]
    entries["a"] = x
    entries["a"] = before
    return x + 1


@pytest.mark.parametrize(("program", "count"), [(replaced, 1), (put_back, 0)])
def test_entries_that_are_put_back_are_no_write(program: Any, count: int) -> None:
    """A dictionary that ends as another is one."""
    entries = {"a": torch.ones(4), "b": torch.zeros(4)}
    assert len(read_program(program, {"entries": entries, "x": torch.ones(4)}).writes) == count


def entered(x: Tensor) -> Tensor:
    PASSING.__enter__()
    return x + 1


def test_a_mode_that_is_left_in_force_is_a_write() -> None:
    """One program would never do it again."""
    written = read_program(entered, {"x": torch.ones(4)}).writes
    assert [write.what for write in written] == ["the modes of torch functions in force"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_sparse_matrix_that_the_loss_holds_is_followed(replaces: bool) -> None:
    """Its values are read where they lie; another matrix is another program."""
    held = {"matrix": torch.eye(8).to_sparse().coalesce()}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(held["matrix"] @ model(batch["x"]), batch["y"])

    def change(_: Any) -> None:
        if replaces:
            held["matrix"] = torch.eye(8).flip(0).to_sparse().coalesce()
        else:
            held["matrix"].values().mul_(2.0)

    changed: list[int] = []

    def once(_: Any) -> None:  # both steps of a pair read the same matrix
        if not changed:
            changed.append(1)
            change(_)

    with pair_of(loss=lambda: loss) as pair:
        pair.train(9, {5: once})
        assert pair.counters().get("recaptures", 0) == replaces


def test_autocast_around_the_step_is_seen() -> None:
    """Switched on for some steps and off again: each is the program that it would be eagerly."""

    def model() -> nn.Module:
        return make(dropout=0.0)

    def run(pair: Pair, indices: range) -> None:
        for index in indices:
            losses = [float(step(batch_of(index))) for step in pair]
            assert losses[0] == pytest.approx(losses[1], rel=1e-2)
            weights = [step.model.get_parameter("6.weight").detach() for step in pair]
            torch.testing.assert_close(*weights, rtol=1e-2, atol=1e-3)

    with pair_of(model, adamw, lambda: loss_fn) as pair:
        run(pair, range(3))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            run(pair, range(3, 6))
        run(pair, range(6, 9))
        assert pair.counters()["recaptures"] == 2
        assert "compiled again because autocast around the step changed" in pair.program.notes


def test_plans_of_one_step_share_what_was_read() -> None:
    """Reading takes seconds, and trials of a choice read the same step."""
    model, forms = make(dropout=0.0), CompiledForms()
    optimizer = sgd(model)
    for _ in range(2):
        plan = Plan(execution="step-graph")
        with PlannedStep(model, loss_fn, optimizer, plan, device="cpu", forms=forms) as step:
            for index in range(3):
                step(batch_of(index))
    assert len(forms.findings.readings) == 1
