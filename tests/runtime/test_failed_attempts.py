"""A step that cannot be captured or compiled leaves what was there; graphs are emulated on the CPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch._subclasses import meta_utils

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError, EquivalenceError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    torch._dynamo.reset()  # it leaves functions alone that it has failed on
    with emulated_graphs():
        yield


class Showing(nn.Module):
    """Keeps what it computed, as an attribute (a normalised weight, say) and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scaled = self.hidden.weight * 2.0
        self.shown: list[Any] = [None]

    def forward(self, x: Tensor) -> Tensor:
        self.scaled = self.hidden.weight * 2.0
        self.shown[0] = y = nn.functional.linear(x, self.scaled).relu()
        return self.out(y)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("fails", ["capture", "check"])
def test_a_capture_that_fails_leaves_what_was_there(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under each name the tensor of the last step: one of a capture was never computed."""

    @contextlib.contextmanager
    def failing(*args: Any, **kwargs: Any) -> Iterator[None]:
        with captured(*args, **kwargs):
            yield
        raise RuntimeError("operation failed due to a previous error during capture")

    def differing(*_: Any, **__: Any) -> None:
        raise EquivalenceError("it differs")

    torch.manual_seed(0)
    model, captured = Showing(), torch.cuda.graph
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, loss_of, optimizer, Plan(execution="graph"), device="cpu") as step:
        for _ in range(EAGER_STEPS):
            step(torch.randn(4, 6))
        if fails == "capture":
            monkeypatch.setattr(torch.cuda, "graph", failing)
        else:
            monkeypatch.setattr("ridgeline.runtime.steps.graphs.graph.check_replay", differing)
        x = torch.randn(4, 6)
        before = model.scaled, model.shown[0], torch.get_rng_state()
        values = [tensor.detach().clone() for tensor in before]
        with pytest.raises((CaptureError, EquivalenceError)):
            step(x)
    assert model.scaled is before[0]
    assert model.shown[0] is before[1]
    now = [model.scaled, model.shown[0], torch.get_rng_state()]
    assert all(map(torch.equal, now, values))


class Normed(nn.Module):
    """A block that renews buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Deep(Normed):
    """A block of another kind."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def failing_assertion() -> Callable[..., None]:
    """One in a file of the compiler's."""
    source = "def assert_metadata_eq(*_, **__): raise AssertionError('float32 != int64')"
    names: dict[str, Any] = {}
    exec(compile(source, meta_utils.__file__, "exec"), names)
    function: Callable[..., None] = names["assert_metadata_eq"]
    return function


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", ["compiled", "compiled+graph"])
def test_an_assertion_of_the_compiler_is_a_refusal(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its type as one of the user's does, and is told apart by where it was raised."""
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monkeypatch.setattr(meta_utils, "assert_metadata_eq", failing_assertion())
    with (
        interpreted(),
        PlannedStep(model, loss_of, optimizer, Plan(execution=execution)) as step,
        pytest.raises(
            CaptureError, match=r"got AssertionError: float32 != int64.*; use execution=.eager."
        ),
    ):
        step(torch.randn(5, 6))


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_step_that_is_not_compiled_again_is_the_one_as_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of it have run by then, so that a refusal would leave it half done."""
    batches = [torch.randn(5, 6) for _ in range(3)]
    eager, model = Normed(), Normed()
    model.load_state_dict(eager.state_dict())
    twins = (eager, Plan()), (model, Plan(execution="compiled"))
    losses: list[list[Tensor]] = []
    for twin, plan in twins:
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        with interpreted(), PlannedStep(twin, loss_of, optimizer, plan) as step:
            losses.append([step(batches[0])])
            twin.norm.eps = 1e-3
            with monkeypatch.context() as patches:
                patches.setattr(meta_utils, "assert_metadata_eq", failing_assertion())
                losses[-1] += [step(batch) for batch in batches[1:]]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close([*model.state_dict().values()], [*eager.state_dict().values()])


class Asserting(Normed):
    """As torchvision's networks check their input."""

    wanted = 6

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.shape[1] == self.wanted, "wrong size")
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_an_assertion_of_the_user_keeps_its_type() -> None:
    """Though it is raised while the step is compiled again, inside of torch."""
    model = Asserting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with interpreted(), PlannedStep(model, loss_of, optimizer, Plan(execution="compiled")) as step:
        step(torch.randn(5, 6))
        model.wanted = 7
        with pytest.raises(AssertionError, match="wrong size"):
            step(torch.randn(5, 6))


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(("execution", "num_good"), [("compiled+graph", 0), ("regional+graph", 1)])
def test_a_step_before_the_capture_that_the_compiler_fails_on_is_refused(
    execution: Execution, num_good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And undone: by region, blocks of the kind that came first have run. The first step was checked."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Normed() for _ in range(2)), *(Deep() for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan, made = Plan(execution=execution), list[Any]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if len(made) == num_good:
            raise RuntimeError("Output 0 of SelectBackward0 is a view")
        made.append(compile_graph(*args, **kwargs))
        return made[-1]

    with interpreted(), PlannedStep(model, loss_of, optimizer, plan, device="cpu") as step:
        step(torch.randn(5, 6))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for block in model:
            block.norm.eps = 1e-3
        compile_graph = compile_fx.fx_codegen_and_compile
        with monkeypatch.context() as patch:
            patch.setattr(compile_fx, "fx_codegen_and_compile", failing)
            with pytest.raises(CaptureError) as raised:
                step(torch.randn(5, 6))
    assert str(raised.value) == (
        f"wanted execution={execution!r} to compile the step, got RuntimeError: Output 0 of "
        "SelectBackward0 is a view; use execution='eager'"
    )
    assert len(made) == num_good
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class Miscompiled(nn.Module):
    """Computes something else where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twisted() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twisted(nn.Module):
    """One of several blocks, as `regional+graph` compiles them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.5 if torch.compiler.is_compiling() else 1.0)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", ["compiled+graph", "regional+graph"])
def test_a_wrong_program_takes_no_step_before_the_capture(execution: Execution) -> None:
    """It is found in the first call, and nothing was trained with it."""
    torch.manual_seed(0)
    model = Miscompiled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = Plan(execution=execution)
    wanted = rf"wanted execution='{execution.replace('+', '.')}' to equal the eager step"
    with (
        interpreted(),
        PlannedStep(model, loss_of, optimizer, plan, device="cpu") as step,
        pytest.raises(EquivalenceError, match=wanted),
    ):
        step(torch.randn(5, 6))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
