"""The capture linter: every rule by its text, what is fine stays unnamed, and nothing is left changed.

The device captured is the CPU, or torch's `meta` device where host and device must differ.
"""

import contextlib
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

from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.runtime.body import StepBody
from ridgeline.runtime.hybrid import lint_observer
from ridgeline.runtime.hybrid.lint import (
    Lint,
    check_capturable,
    inspect_callable,
    inspect_step,
    is_doubtful,
    lint_callable,
    lint_step,
    optimizer_findings,
)
from ridgeline.runtime.hybrid.lint_rules import RULES

FILE = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)  # fmt: skip
OUTSIDE = torch.ones(3)


def line_of(program: Callable[..., Any], after: int = 1) -> str:
    code = program.__code__
    return f"{FILE}:{code.co_firstlineno + after} in {code.co_name}"


def item(x: Tensor) -> float:
    return x.sum().item()


def copy_to_host(x: Tensor) -> Tensor:
    return x.cpu()


def boolean_index(x: Tensor) -> Tensor:
    return x[x > 0]


def python_random(x: Tensor) -> Tensor:
    return x * random.random()


def numpy_random(x: Tensor) -> Tensor:
    return x * np.random.rand()


def own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(3, generator=torch.Generator())


def seeding(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse()


def swap_data(x: Tensor) -> Tensor:
    x.data = torch.zeros(3, 3)
    return x


def unpinned_copy(x: Tensor) -> Tensor:
    return x * OUTSIDE.to("meta")


def host_tensor(x: Tensor) -> Tensor:
    return x * OUTSIDE[0]


def host_rand(x: Tensor) -> Tensor:
    return x * torch.rand(())


MESSAGES = [
    (item, "cpu", "wanted values that stay on the device, got tensor.item() at {}: the host waits for the device to read it, and a replay would go on with what was read at capture; keep it a tensor (torch.where, a mask as a factor), or read it from the result of the step"),
    (copy_to_host, "cpu", "wanted results that stay on the device, got tensor.cpu() at {}: the copy to the host is waited for, and would hold the values seen at capture; copy what the step returns, after the step"),
    (boolean_index, "cpu", "wanted shapes that do not depend on values, got aten.index at {}: the host waits to learn how many elements there are, and a replay would keep that number; use a form of fixed shape: torch.where, masked_fill, a weight of zero, output_size="),
    (python_random, "cpu", "wanted random numbers drawn on the device, got Python's random at {}: it is drawn on the host, once, at capture, and every replay repeats it; draw with device= on the device of the step, or pass it in the batch"),
    (own_generator, "cpu", "wanted the default generator of the device, got aten.rand at {}: a graph advances the default generator only; another one would repeat its numbers or fail; leave out generator=, and seed with torch.manual_seed before the step"),
    (seeding, "cpu", "wanted random state that the step leaves alone, got torch.manual_seed() at {}: seeding and reading the state are host work: refused in a capture, or done once and never again; seed before the step; give activation checkpoints preserve_rng_state=False if they hold no dropout"),
    (sparse, "cpu", "wanted dense tensors, got aten._to_sparse at {}: the number of non-zero entries depends on the data, so the host waits for it; make the gradient dense, for example nn.Embedding(sparse=False)"),
    (swap_data, "cpu", "wanted parameters and buffers changed in place, got tensor.data = ... at {}: the name gets another tensor, while every replay reads the one of the capture; write into it: copy_, add_, lerp_"),
    (unpinned_copy, "meta", "wanted data that is on the device already, got aten._to_copy at {}: a copy from host memory that is not pinned, or not asked for with non_blocking=True, makes the host wait; put it in the batch or a buffer of the model, or make it on the device (torch.full, torch.arange)"),
    (host_tensor, "meta", "wanted every tensor of the step on the device, got aten.select at {}: a tensor on the host is read once, at capture, and every replay repeats what it held then; move it to the device before: register_buffer in the model, or a leaf of the batch"),
    (host_rand, "meta", "wanted random numbers drawn on the device, got aten.rand at {}: it is drawn on the host, once, at capture, and every replay repeats it; draw with device= on the device of the step, or pass it in the batch"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "device", "message"), MESSAGES)
def test_message(program: Callable[..., Any], device: str, message: str) -> None:
    """Each rule says what it wants, what it got, on which line, why, and what to do."""
    (found,) = lint_callable(program, torch.ones(3, 3, device=device), device=device)
    assert str(found) == message.format(line_of(program))


def test_numpy_message() -> None:
    """The generator of numpy is caught by its state, without a line."""
    (found,) = lint_callable(numpy_random, torch.ones(3), device="cpu")
    assert str(found).startswith(
        "wanted random numbers drawn on the device, got numpy.random at an unknown line: it is drawn"
    )


def one_hot(x: Tensor) -> Tensor:
    return nn.functional.one_hot(x.long())


def tensor_from_list(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0], device="meta")


def copy_in(x: Tensor) -> Tensor:
    return x.copy_(OUTSIDE)


def index_from_host(x: Tensor) -> Tensor:
    return x[torch.tensor([0, 1])]


def synchronize(x: Tensor) -> None:
    """Where there is no GPU the call raises, but it was seen; under an alias, too."""
    alias = torch.cuda.synchronize
    with contextlib.suppress(AssertionError, RuntimeError):
        alias()


BREAKING = [
    (lambda x: float(x.sum()), "cpu", "host-sync", "float(tensor)"),
    (lambda x: x if x.sum() > 0 else -x, "cpu", "host-sync", "bool(tensor)"),
    (lambda x: range(x.sum().long()), "cpu", "host-sync", "tensor as an index"),
    (lambda x: x.tolist(), "cpu", "host-sync", "tensor.tolist()"),
    (lambda x: x.numpy(), "cpu", "host-sync", "tensor.numpy()"),
    (lambda x: f"{x.sum():.2f}", "cpu", "host-sync", "tensor in a format string"),
    (repr, "cpu", "host-sync", "printing a tensor"),
    (lambda x: torch.equal(x, x), "cpu", "host-sync", "torch.equal()"),
    (one_hot, "cpu", "host-sync", "aten._local_scalar_dense"),
    (lambda x: torch.linalg.inv(x + 3 * torch.eye(3)), "cpu", "host-sync", "aten._linalg_check_errors"),
    (lambda x: x.nonzero(), "cpu", "dynamic-shape", "aten.nonzero"),
    (lambda x: torch.where(x > 0), "cpu", "dynamic-shape", "aten.nonzero"),
    (lambda x: x.masked_select(x > 0), "cpu", "dynamic-shape", "aten.masked_select"),
    (lambda x: x.unique(), "cpu", "dynamic-shape", "aten._unique2"),
    (lambda x: x.unique_consecutive(), "cpu", "dynamic-shape", "aten.unique_consecutive"),
    (lambda x: x.long().flatten().bincount(), "cpu", "dynamic-shape", "aten.bincount"),
    (lambda x: x.repeat_interleave(x[0].long(), 0), "cpu", "dynamic-shape", "aten.repeat_interleave"),
    (lambda x: x.index_put_((x > 0,), torch.arange(9.0)), "cpu", "dynamic-shape", "aten.index_put_"),
    (lambda x: x * float(OUTSIDE.sum()), "meta", "host-tensor", "aten.sum"),
    (tensor_from_list, "meta", "unpinned-copy", "torch.tensor(..., device='meta')"),
    (lambda x: x[[0, 1]], "meta", "unpinned-copy", "a list as an index"),
    (copy_in, "meta", "unpinned-copy", "aten.copy_"),
    (index_from_host, "meta", "unpinned-copy", "aten.index"),
    (synchronize, "cpu", "host-sync", "torch.cuda.synchronize()"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "device", "rule", "op"), BREAKING)
def test_found(program: Callable[..., Any], device: str, rule: str, op: str) -> None:
    """What breaks a rule is found, under the name that the user knows."""
    found = lint_callable(program, torch.ones(3, 3, device=device), device=device)
    assert [(one.rule, one.op) for one in found] == [(rule, op)]


def fill_by_mask(x: Tensor) -> None:
    x[x > 0] = 0.0


FINE = [
    (lambda x: x[torch.tensor([0, 1])], "cpu"),
    (fill_by_mask, "cpu"),
    (lambda x: x.repeat_interleave(x[0].long(), 0, output_size=3), "cpu"),
    (lambda x: x.repeat_interleave(2, 0), "cpu"),
    (nn.functional.dropout, "cpu"),
    (lambda x: torch.where(x > 0, x, 0.0), "cpu"),
    (lambda x: x * torch.tensor(2.0), "meta"),
    (lambda x: x * torch.full((3,), 2.0, device="meta"), "meta"),
    (lambda x: x * torch.tensor([2.0, 3.0]).sum().item(), "meta"),
]


@pytest.mark.parametrize(("program", "device"), FINE)
def test_fine(program: Callable[..., Any], device: str) -> None:
    """What a graph can hold gives neither finding nor doubt, constants from Python numbers included."""
    assert inspect_callable(program, torch.ones(3, 3, device=device), device=device) == Lint((), ())


def several(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x * x.max().item()
    return x[x > 0]


def test_all_in_one_pass() -> None:
    """One run finds everything, each thing once, in the order of the program; the refusal lists it."""
    found = lint_callable(several, torch.ones(3), device="cpu")
    assert [one.line for one in found] == [line_of(several, after) for after in (1, 2, 3)]
    with pytest.raises(CaptureError) as caught:
        check_capturable(found)
    assert str(caught.value) == (
        "wanted a program that a CUDA graph can hold, got 3 obstacles; nothing was captured. Remove them, or "
        "use an execution mode without a graph:" + "".join(f"\n- {one}" for one in found)
    )
    check_capturable(())


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
    found = lint_step(make_body(Masked()), BATCH, device="cpu")
    forward = line_of(Masked.forward, 2)
    assert [(one.op, one.line) for one in found] == [
        ("aten.index", forward),
        ("aten.index_put", f"the backward of {forward}"),
    ]


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * float(grad.sum() * 0 + 1)


def custom_loss(model: nn.Module, batch: Any) -> Tensor:
    return Doubling.apply(loss_fn(model, batch))


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
    assert lint_step(make_body(Net(), loss=clearing_loss), BATCH, device="cpu") == ()
    plan = Plan(accumulate=2)
    (found,) = lint_step(make_body(Net(), loss=clearing_loss, plan=plan), BATCH, device="cpu")
    assert str(found) == (
        f"wanted gradients that stay where they are, got tensor.grad = None at {line_of(clearing_loss, 2)}: "
        "what is set to None gives its memory to other operators, while every replay writes it again; leave "
        "zeroing to the step, or clear the gradient in place with grad.zero_()"
    )


def test_replaced_buffer() -> None:
    """A buffer that gets another tensor is found, and is back under its name afterwards."""
    body = make_body(Counting())
    count = body.model.count
    (found,) = lint_step(body, BATCH, device="cpu")
    assert (found.rule, found.op) == ("moved-state", "assignment of buffer 'count'")
    assert found.line == line_of(Counting.forward)
    assert body.model.count is count
    assert count.item() == 0


class Rounding(torch.optim.SGD):
    """An optimizer of the user's own that reads its gradients on the host."""

    def step(self, closure: Any = None) -> None:
        self.seen = [float(p.grad.sum()) for g in self.param_groups for p in g["params"]]


def test_users_optimizer() -> None:
    """Lines in an optimizer of the user's are found; torch's own are judged by their settings."""
    (found,) = lint_step(make_body(Net(), Rounding, lr=0.1), BATCH, device="cpu")
    assert found.op == "float(tensor)"
    assert found.line.startswith(
        f"{FILE}:{Rounding.step.__wrapped__.__code__.co_firstlineno + 1} in "
    )


def optimizer(name: str, **options: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))], **options)


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
    found = lint_step(make_body(Masked(), torch.optim.LBFGS), BATCH, device="cpu")
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
    body.reducer = Untouchable()
    fired = []
    for parameter in body.model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    found = lint_step(body, BATCH, device="cpu")
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
    assert lint_step(body, batch, device="cpu")
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
        lint_callable(broken, OUTSIDE, device="cpu")
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


def test_every_rule_has_text() -> None:
    """No rule is without something wanted, a reason and a remedy."""
    assert all(all(rule) for rule in RULES.values())
