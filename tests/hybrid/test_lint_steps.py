"""The linter on training steps and modules: optimizers, gradients, buffers, doubts, and no trace left.

The device captured is the CPU, or torch's `meta` device where host and device must differ.
"""

import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ridgeline.lint import lint_observer
from ridgeline.lint.lint import (
    Finding,
    Lint,
    inspect_callable,
    inspect_step,
    is_doubtful,
    optimizer_findings,
)
from ridgeline.lint.lint_rules import RULES
from ridgeline.plan import Plan
from ridgeline.runtime.steps.body.body import StepBody

FILE = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)  # fmt: skip
OUTSIDE = torch.ones(3)


def line_of(program: Callable[..., Any], after: int = 1) -> str:
    code = program.__code__
    return f"{FILE}:{code.co_firstlineno + after} in {code.co_name}"


class Net(nn.Module):
    """A clean model, with everything that usually comes along."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.dropout(self.norm(self.embed(x)), 0.3, self.training))


class Masked(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y[y > -9].mean()


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x)


BATCH = (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 0, 1]))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_body(
    model: nn.Module, optimizer: Any = torch.optim.Adam, loss: Any = loss_fn, **options: Any
) -> StepBody:
    plan = options.pop("plan", Plan())
    made = optimizer(model.parameters(), **options)
    device = torch.device("cpu")
    return StepBody(model, loss, made, plan, None, clip_norm=1.0, device=device)


def findings_of(body: StepBody, batch: Any) -> tuple[Finding, ...]:
    lint = inspect_step(body, batch, device="cpu")
    return (*lint.optimizer, *lint.findings)


@pytest.mark.parametrize("precision", ["as-is", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_clean_step(optimizer: Any, accumulate: int, precision: Any) -> None:
    """A whole step with dropout, batch norm, clipping and accumulation has nothing to find."""
    plan = Plan(accumulate=accumulate, precision=precision)
    body = make_body(Net(), optimizer, lr=0.1, plan=plan)
    assert inspect_step(body, BATCH, device="cpu") == Lint((), ())


def test_backward() -> None:
    """An operator of the backward pass is told with the line of its forward."""
    found = findings_of(make_body(Masked()), BATCH)
    forward = line_of(Masked.forward, 2)
    assert [(one.op, one.line) for one in found] == [
        ("aten.index", forward),
        ("aten.index_put", f"the backward of {forward}"),
    ]


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name, ctx.variable = "doubling", x  # as autograd's own nodes have something there
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * float(grad.sum() * 0 + 1)


def custom_loss(model: nn.Module, batch: Any) -> Tensor:
    return Doubling.apply(loss_fn(model, batch)).sum()


def test_custom_function() -> None:
    """A custom autograd function is a doubt; what its backward does on the host is found there."""
    lint = inspect_step(make_body(Net(), loss=custom_loss), BATCH, device="cpu")
    assert [(one.op, one.line) for one in lint.findings] == [
        ("aten._local_scalar_dense", line_of(Doubling.backward, 2))
    ]
    assert [str(doubt) for doubt in lint.doubts] == [
        f"custom autograd function Doubling at {line_of(custom_loss)}"
    ]
    assert not is_doubtful(lint)
    assert is_doubtful(Lint((), lint.doubts))
    assert not is_doubtful(Lint((), ()))


def test_unknown_operator() -> None:
    """An operator of another library is a doubt, with its line."""
    library = torch.library.Library("ridgeline_lint_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    def program(x: Tensor) -> Tensor:
        return torch.ops.ridgeline_lint_test.twice(x)

    lint = inspect_callable(program, torch.ones(3), device="cpu")
    assert lint.findings == ()
    assert [str(doubt) for doubt in lint.doubts] == [
        f"operator ridgeline_lint_test.twice at {line_of(program)}"
    ]


def clearing_loss(model: nn.Module, batch: Any) -> Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    return loss_fn(model, batch)


def test_gradient_set_to_none() -> None:
    """A gradient cleared by the user's code inside the step is found; an absent one is not."""
    assert findings_of(make_body(Net(), loss=clearing_loss), BATCH) == ()
    plan = Plan(accumulate=2)
    (found,) = findings_of(make_body(Net(), loss=clearing_loss, plan=plan), BATCH)
    assert str(found) == (
        f"wanted gradients that stay where they are, got tensor.grad = None at {line_of(clearing_loss, 2)}: "
        "what is set to None gives its memory to other operators, while every replay writes it again; leave "
        "zeroing to the step, or clear the gradient in place with grad.zero_()"
    )


def test_replaced_buffer() -> None:
    """A buffer that gets another tensor is found, and is back under its name afterwards."""
    body = make_body(Counting())
    count = body.model.count
    (found,) = findings_of(body, BATCH)
    assert (found.rule, found.op) == ("moved-state", "assignment of buffer 'count'")
    assert found.line == line_of(Counting.forward)
    assert body.model.count is count
    assert count.item() == 0


class Rounding(torch.optim.SGD):
    """An optimizer of the user's own that reads its gradients on the host."""

    def step(self, closure: Any = None) -> None:
        self.seen = [float(p.grad.sum()) for g in self.param_groups for p in g["params"]]


def test_users_optimizer() -> None:
    """A step of the user's own is named and not run; torch's are judged by their settings."""
    body = make_body(Net(), Rounding, lr=0.1)
    lint = inspect_step(body, BATCH, device="cpu")
    assert lint.findings == ()
    (found,) = lint.optimizer
    assert str(found) == (
        f"wanted an optimizer with a step of torch's own, got Rounding at {__name__}.Rounding.step: what "
        "another one reads or counts in Python would be baked in; let it step outside of the graph, as plans "
        "that capture do, or use one of torch"
    )
    assert findings_of(body, BATCH) == lint.optimizer
    assert not hasattr(body.optimizer, "seen")


def optimizer(name: str, **options: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))], **options)


def test_sparse_gradients_keep_the_optimizer_out() -> None:
    """And nothing else: a graph may make them, whose number of rows is that of the indices."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    body = make_body(model, torch.optim.SGD, lambda m, b: m(b).square().mean(), lr=0.1)
    lint = inspect_step(body, torch.zeros(4, 2, dtype=torch.int64), device="cpu")
    assert lint.findings == ()
    assert [str(one).partition(":")[0] for one in lint.optimizer] == [
        "wanted dense tensors, got a sparse gradient at the weight of 0"
    ]


CAPTURABLE = ["SGD", "Adagrad", "Adam", "AdamW", "Adamax", "Adadelta", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]  # fmt: skip


@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_optimizer(name: str) -> None:
    """What make_capturable changes by itself is no finding: a plain learning rate, capturable off."""
    assert optimizer_findings(optimizer(name, lr=0.1)) == ()


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Adafactor", "Muon"])
def test_optimizer_messages(name: str) -> None:
    """Without a capturable form, the optimizer and its learning rate are named, and the step is not run."""
    form, rate = optimizer_findings(optimizer(name, lr=0.1))
    assert str(form) == (
        f"wanted an optimizer whose step runs on the device alone, got {name} at param_groups[0] of the "
        "optimizer: it has neither a capturable nor a fused form for these settings, so every step needs the "
        "host; use one that has (SGD, Adam, AdamW, RMSprop, ...), or an execution mode without a graph"
    )
    assert str(rate) == (
        f"wanted a learning rate that lives in a tensor, got lr=0.1 of {name} at param_groups[0] of the "
        "optimizer: a Python number is baked in at capture, and schedulers no longer have an effect; keep "
        "group['lr'] a 0-d tensor on the device, and never read it on the host"
    )


def test_optimizer_without_capture_in_a_step() -> None:
    """The step of LBFGS needs a closure; it is not run, and the rest is still linted."""
    found = findings_of(make_body(Masked(), torch.optim.LBFGS), BATCH)
    assert [one.rule for one in found] == [
        "optimizer",
        "learning-rate",
        "dynamic-shape",
        "dynamic-shape",
    ]


@pytest.mark.parametrize(
    ("made", "rule", "op"),
    [
        (("SGD", {"differentiable": True}), "optimizer", "SGD(differentiable=True)"),
        (("RMSprop", {"foreach": False}), "rate-read", "RMSprop(foreach=False)"),
        (("Adadelta", {"foreach": False}), "rate-read", "Adadelta(foreach=False)"),
    ],
)
def test_optimizer_settings(made: tuple[str, dict[str, Any]], rule: str, op: str) -> None:
    """Settings that rule out the capturable form are named."""
    found = optimizer_findings(optimizer(made[0], **made[1]))
    assert (found[0].rule, found[0].op) == (rule, op)
    if rule == "rate-read":
        assert str(found[0]) == (
            f"wanted an update that leaves the learning rate on the device, got {op} at param_groups[0] of the "
            "optimizer: its form for one tensor at a time reads the learning rate on the host; leave foreach "
            "at None or True, and differentiable off"
        )


class Untouchable:
    """A reducer that must not be used while linting."""


def test_reducer_is_left_alone() -> None:
    """With a reducer only loss and gradients are computed: no hook runs, no gradient is accumulated."""
    body = make_body(Masked())
    body.synchronizer = Untouchable()
    fired = []
    for parameter in body.model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    found = findings_of(body, BATCH)
    assert [one.op for one in found] == ["aten.index", "aten.index_put"]
    assert fired == []
    assert all(parameter.grad is None for parameter in body.model.parameters())


def test_nothing_changes() -> None:
    """Parameters, buffers, optimizer, random state, the batch and the profile function are as before."""
    torch.manual_seed(3)
    body = make_body(Net())
    batch = (BATCH[0].clone(), BATCH[1].clone())

    def greedy(model: nn.Module, batch: Any) -> Tensor:
        random.random()
        np.random.rand()
        batch[1].zero_()
        return loss_fn(model, batch)

    body = StepBody(
        body.model, greedy, body.optimizer, Plan(), None, clip_norm=None, device=torch.device("cpu")
    )
    tensors = [tensor.clone() for tensor in body.model.state_dict().values()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    profile = sys.getprofile()
    assert findings_of(body, batch)
    for tensor, old in zip(body.model.state_dict().values(), tensors, strict=True):
        assert torch.equal(tensor, old)
    assert dict(body.optimizer.state) == {}
    assert body.optimizer.param_groups[0]["lr"] == 0.001
    assert states == (
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    )  # fmt: skip
    assert torch.equal(batch[1], BATCH[1])
    assert sys.getprofile() is profile


def test_module_as_callable() -> None:
    """A module is called without gradients and keeps its buffers; nn's hidden fast path is a doubt."""
    model = Net().train()
    before = model.norm.num_batches_tracked.clone()
    assert inspect_callable(model, BATCH[0], device="cpu") == Lint((), ())
    assert torch.equal(model.norm.num_batches_tracked, before)
    encoder = nn.TransformerEncoderLayer(4, 1, batch_first=True).eval()
    lint = inspect_callable(encoder, torch.ones(2, 3, 4), device="cpu")
    assert [str(doubt) for doubt in lint.doubts] == [
        "the inference path of nn.TransformerEncoderLayer at the program itself",
        "the inference path of nn.MultiheadAttention at the program itself",
    ]


def test_errors_of_the_program_pass_through() -> None:
    """What the program raises is raised, and watching ends."""

    def broken(x: Tensor) -> Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        inspect_callable(broken, OUTSIDE, device="cpu")
    assert sys.getprofile() is None
    assert float(OUTSIDE.sum()) == 3.0


def test_sync_warnings(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """What CUDA itself calls a synchronisation counts; other warnings reach the user as before."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def program(text: str) -> int:
        warnings.warn(
            "Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1
        )
        warnings.warn(text, UserWarning, stacklevel=1)
        return 3

    warnings.simplefilter("always")
    text = "called a synchronizing CUDA operation (Triggered internally at ...)"
    assert lint_observer._run(program, (text,), {}, "cuda") == (3, True)
    assert len(recwarn) == 0
    assert lint_observer._run(program, ("something else",), {}, "cuda") == (3, False)
    assert [str(one.message) for one in recwarn] == ["something else"]
    assert modes == ["warn", 0, "warn", 0]


def test_a_copy_in_a_loop_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that comes again makes the host wait again, which is the same obstacle and no other."""
    run = lint_observer._run

    def synced(func: Any, args: Any, kwargs: Any, device: str) -> tuple[Any, bool]:
        name = getattr(func, "__name__", "")
        return run(func, args, kwargs, device)[0], name in ("to", "_to_copy.default")

    def layers(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.arange(4.0).to(x.device)
        return x

    monkeypatch.setattr(lint_observer, "_run", synced)
    found = inspect_callable(layers, torch.ones(4, device="meta"), device="meta").findings
    assert [one.rule for one in found] == ["unpinned-copy"]


def test_every_rule_has_text() -> None:
    """No rule is without something wanted, a reason and a remedy."""
    assert all(all(rule) for rule in RULES.values())
