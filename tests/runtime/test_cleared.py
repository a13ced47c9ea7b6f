"""A step that a trial has captured is not looked at again, unless something of it is another since."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.lint.child_trial import TrialOutcome
from ridgeline.plan import Execution, Plan
from ridgeline.programs.compiling import CompiledForms
from ridgeline.reach.undo import Undo
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.runtime.steps.checks.perturbed_runs import ONE_SHIFT, SHIFTS
from ridgeline.runtime.steps.graphs import clearance, cleared, graph
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.reads import StepReads


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    with emulated_graphs(), interpreted():
        yield


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done before a first step."""
    found: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: (found.append(name), function(*args, **how))[1]

    monkeypatch.setattr(clearance, "inspect_step", noted("lint", clearance.inspect_step))
    monkeypatch.setattr(graph, "check_compiled", noted("check", graph.check_compiled))
    return found


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.by


def squared(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch) - 1.0).square().mean()


def batch_of(index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(index))


def steps(
    model: nn.Module,
    optimizer: Any,
    plan: Plan,
    forms: CompiledForms | None,
    count: int,
    *,
    is_undone: bool = False,
) -> None:
    with PlannedStep(
        model, squared, optimizer, plan, device="cpu", forms=forms, is_undone=is_undone
    ) as step:
        for index in range(count):
            step(batch_of(index))


def nothing(model: Net, optimizer: Any) -> None:
    """Nothing is another."""


def lie_elsewhere(model: Net, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def scale(model: Net, optimizer: Any) -> None:
    model.by = 2.0


def hook(model: Net, optimizer: Any) -> None:
    model[1].register_forward_hook(lambda module, args, out: out * 2.0)


def hook_step(model: Net, optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: model[2].bias.data.add_(0.1))


def decay(model: Net, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The perturbations under which captures were compared."""
    found: list[Any] = []

    def noted(*args: Any, **how: Any) -> None:
        found.append(how["shifts"])
        check_replay(*args, **how)

    monkeypatch.setattr(graph, "check_replay", noted)
    return found


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", ["graph", "compiled+graph"])
@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        (nothing, False),
        (lie_elsewhere, False),
        (scale, True),
        (hook, True),
        (hook_step, True),
        (decay, True),
    ],
)
def test_what_a_trial_has_found_out_holds_until_something_changes(
    looked: list[str], compared: list[Any], execution: Execution, change: Any, is_another: bool
) -> None:
    """The kept step trains as the plain loop does in both cases."""
    plan, forms, found = Plan(execution=execution), CompiledForms(), []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        mine = Plan() if is_plain else plan
        steps(model, optimizer, mine, None if is_plain else forms, EAGER_STEPS + 2)
        optimizer.state.clear()
        change(model, optimizer)
        looked.clear()
        compared.clear()
        steps(model, optimizer, mine, None if is_plain else forms, EAGER_STEPS + 2)
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    wanted = ["lint", "check"] if execution == "compiled+graph" else ["lint"]
    assert looked == (wanted if is_another else [])
    assert compared == [SHIFTS if is_another else ONE_SHIFT]


class MakesLate(Net):
    """Makes what it needs when it is first called, as transformers install hooks."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "factor"):
            self.factor = 2.0
        return super().forward(x) * self.factor


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", ["graph", "compiled+graph"])
def test_what_a_trial_has_found_out_of_code_that_makes_what_it_needs_late(
    looked: list[str], compared: list[Any], execution: Execution
) -> None:
    """The trial is undone, so that it is made again in the first step that counts, which runs as written."""
    plan, forms, found = Plan(execution=execution), CompiledForms(), []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = MakesLate()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if not is_plain:
            before = Undo(model, squared, optimizer)
            steps(model, optimizer, plan, forms, EAGER_STEPS + 2, is_undone=True)
            before.restore()
            optimizer.state.clear()
        looked.clear()
        compared.clear()
        steps(model, optimizer, Plan() if is_plain else plan, forms, EAGER_STEPS + 3)
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert (looked, compared) == ([], [ONE_SHIFT])


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_trial_checks_what_it_compiles_once(looked: list[str]) -> None:
    """Its capture is checked, so its first steps, which are undone, need no check; those that count do."""
    plan, forms = Plan(execution="compiled+graph"), CompiledForms()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps(model, optimizer, plan, forms, EAGER_STEPS + 2, is_undone=True)
    assert looked == ["lint"]
    steps(model, optimizer, plan, forms, EAGER_STEPS + 2)
    assert looked == ["lint"]  # the trial's findings hold
    steps(model, optimizer, plan, None, EAGER_STEPS + 2)
    assert looked == ["lint", "lint", "check"]


def digests_after(change: Callable[[Net], None], earlier: frozenset[str] = frozenset()) -> set[str]:
    """Of what a trial captures, of a network of its own; `earlier` are those of another process."""
    torch.manual_seed(0)
    model, forms = Net(), CompiledForms()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    change(model)
    forms.findings.earlier_digests = earlier
    steps(model, optimizer, Plan(execution="graph"), forms, EAGER_STEPS + 2, is_undone=True)
    return forms.findings.digests


class OtherNet(Net):
    """Other code, the same operators."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


class Logging(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.by != 1.0:
            self.last = "scaled"
        return super().forward(x)


def become(kind: type[Net]) -> Callable[[Net], None]:
    return lambda model: setattr(model, "__class__", kind)


def unchanged(model: Net) -> None:
    """It is as it was."""


def scaled(model: Net) -> None:
    model.by = 2.0


@pytest.mark.parametrize(
    ("change", "is_looked_at"),
    [(unchanged, False), (scaled, True), (become(OtherNet), True), (become(Logging), True)],
)
def test_what_an_earlier_process_captured_is_not_looked_at_again(
    looked: list[str], compared: list[Any], change: Callable[[Net], None], is_looked_at: bool
) -> None:
    """And compared once; unless its code or its operators are others; and only in a trial, which is undone."""
    earlier = frozenset(digests_after(unchanged))
    assert len(earlier) == 1
    assert compared[0] == SHIFTS
    looked.clear()
    compared.clear()
    found = digests_after(change, earlier)
    assert looked == ["lint"] * is_looked_at
    assert compared[0] == (SHIFTS if is_looked_at else ONE_SHIFT)
    assert (found == earlier) is not is_looked_at
    forms, model = CompiledForms(), Net()
    forms.findings.earlier_digests = earlier
    looked.clear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps(model, optimizer, Plan(execution="graph"), forms, EAGER_STEPS + 2)
    assert looked == ["lint"]


@pytest.mark.parametrize(
    "way",
    [{}, {"execution": "graph"}, {"random": "compiled"}, {"kernels": "combined"}],
    ids=lambda way: "-".join(way) or "the same",
)
def test_what_was_run_in_another_way_was_not_captured_earlier(way: dict[str, Any]) -> None:
    """Of other kernels nobody knows that they compute the same."""
    digests = list[str]()
    for settings in ({}, way):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = Plan(**{"execution": "compiled+graph", **settings})
        with PlannedStep(model, squared, optimizer, plan, device="cpu") as step:
            reads = StepReads(step._body, batch_of(0), "cpu", is_lifted=False)
            digests.append(cleared._digest(step._body, batch_of(0), reads))
    assert (digests[0] == digests[1]) is (not way)


class Doubled(torch.autograd.Function):
    """Nobody can tell by looking whether it can be captured."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """It needs nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2.0


class Doubtful(Net):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubled.apply(super().forward(x))
        return doubled


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_left_a_doubt_is_looked_at_in_each_process(
    looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though within a process a child has settled it."""
    outcome = TrialOutcome("ok", "", 1.0)
    monkeypatch.setattr(clearance, "try_step_in_child", lambda *_, **__: outcome)
    model, forms = Doubtful(), CompiledForms()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        steps(model, optimizer, Plan(execution="graph"), forms, EAGER_STEPS + 2, is_undone=True)
    assert looked == ["lint"]
    assert forms.findings.digests == set()


def test_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Though names in a set come in another order in each."""
    script = tmp_path / "digest.py"
    script.write_text(DIGEST)
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(script)]
        found.add(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


DIGEST = """
import torch
from torch import nn
from ridgeline.plan import Plan
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs.cleared import _digest
from ridgeline.runtime.steps.whole_step.reads import StepReads

class Net(nn.Linear):
    kind = "tanh"
    def forward(self, x):
        y = super().forward(x)
        return y.tanh() if self.kind in {"tanh", "sigmoid", "relu", "gelu"} else y

model = Net(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
loss = lambda model, batch: model(batch).square().mean()
batch, device = torch.ones(3, 4), torch.device("cpu")
body = StepBody(model, loss, optimizer, Plan(execution="graph"), None, clip_norm=1.0, device=device)
print(_digest(body, batch, StepReads(body, batch, "cpu", is_lifted=False)))
"""
