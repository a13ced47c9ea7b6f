"""The capture linter on a GPU: real synchronisations, copies and captures; clean steps stay clean."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.lint import lint_judge
from ridgeline.lint.child_trial import try_in_child, try_step_in_child
from ridgeline.lint.lint import (
    Lint,
    inspect_callable,
    inspect_step,
)
from ridgeline.plan import Plan
from ridgeline.runtime.steps.body.body import StepBody

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HOST = torch.ones(3)


def fill_by_mask(x: Tensor) -> None:
    x[x > 0] = 0.0


def synchronize(x: Tensor) -> None:
    torch.cuda.synchronize()


def rng_state(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state()


def copy_in_a_loop(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + torch.arange(3.0).to(x.device)
    return x


BREAKING = [
    (copy_in_a_loop, "unpinned-copy", "aten._to_copy"),
    (lambda x: x.sum().item(), "host-sync", "tensor.item()"),
    (lambda x: x if x.sum() > 0 else -x, "host-sync", "bool(tensor)"),
    (lambda x: x.tolist(), "host-sync", "tensor.tolist()"),
    (lambda x: x.cpu(), "host-copy", "tensor.cpu()"),
    (lambda x: x.to("cpu", non_blocking=True), "host-copy", "aten._to_copy"),
    (lambda x: x * HOST.to("cuda"), "unpinned-copy", "aten._to_copy"),
    (lambda x: x * HOST.to("cuda", non_blocking=True), "unpinned-copy", "aten._to_copy"),
    (lambda x: x.copy_(HOST), "unpinned-copy", "aten.copy_"),
    (
        lambda x: x * torch.tensor([1.0, 2.0, 3.0], device="cuda"),
        "unpinned-copy",
        "torch.tensor(..., device='cuda')",
    ),
    (lambda x: x[[0, 1]], "unpinned-copy", "a list as an index"),
    (lambda x: x[torch.tensor([0, 1])], "unpinned-copy", "aten.index"),
    (lambda x: x * HOST[0], "host-tensor", "aten.select"),
    (lambda x: x * torch.rand(()), "host-randomness", "aten.rand"),
    (lambda x: x[x > 0], "dynamic-shape", "aten.index"),
    (lambda x: x.nonzero(), "dynamic-shape", "aten.nonzero"),
    (lambda x: x.unique(), "dynamic-shape", "aten._unique2"),
    (synchronize, "host-sync", "torch.cuda.synchronize()"),
    (rng_state, "random-state", "torch.cuda.get_rng_state()"),
]


@pytest.mark.parametrize(("program", "rule", "op"), BREAKING)
def test_found(program: Callable[..., Any], rule: str, op: str) -> None:
    """What breaks a rule is found, and the process can capture afterwards."""
    found = inspect_callable(program, torch.ones(3, 3, device="cuda"), device="cuda").findings
    assert (found[0].rule, found[0].op) == (rule, op)
    assert "test_lint.py:" in found[0].line
    assert len(found) == 1


FINE = [
    nn.functional.dropout,
    fill_by_mask,
    lambda x: x * torch.tensor(2.0),
    lambda x: x.repeat_interleave(x[0].long(), 0, output_size=3),
    lambda x: nn.functional.one_hot(x.long(), 3),
    lambda x: torch.where(x > 0, x, 0.0).sort().values.cumsum(0).topk(2),
    lambda x: x.softmax(-1) @ x,
    lambda x: torch.cat([torch.tensor([], device="cuda"), torch.empty(0).cuda(), x[0]]),
]


@pytest.mark.parametrize("program", FINE)
def test_fine_is_captured(program: Callable[..., Any]) -> None:
    """What the linter passes, a capture takes."""
    x = torch.ones(3, 3, device="cuda")
    assert inspect_callable(program, x, device="cuda") == Lint((), ())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        program(x)
    graph.replay()
    torch.cuda.synchronize()


def test_pinned_copy_is_captured() -> None:
    """A copy from memory that was pinned before, asked for without blocking, is part of the graph."""
    pinned = torch.ones(3).pin_memory()

    def program(x: Tensor) -> Tensor:
        return x * pinned.to("cuda", non_blocking=True)

    assert inspect_callable(program, torch.ones(3, device="cuda"), device="cuda") == Lint((), ())


def test_pinning() -> None:
    """Pinning inside is found."""
    found = inspect_callable(
        lambda x: x.copy_(HOST.pin_memory(), non_blocking=True),
        torch.ones(3, device="cuda"),
        device="cuda",
    ).findings
    assert "pinning" in [one.rule for one in found]


def test_what_the_table_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that nobody listed is found when CUDA says that the host waited."""
    monkeypatch.setattr(lint_judge, "OPERATORS", {})
    monkeypatch.setattr(lint_judge, "_rule_of_tags", lambda tags: None)
    x = torch.ones(3, device="cuda")
    (found,) = inspect_callable(lambda x: x.nonzero(), x, device="cuda").findings
    assert found.rule == "host-sync"
    assert found.op in ("aten.nonzero", "torch.Tensor.nonzero")  # by who of the two hears of it


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[1] / "hybrid")])
    return importlib.import_module("child_programs")


BATCH = (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))


def make_body(programs: ModuleType, name: str, **options: Any) -> StepBody:
    model = programs.Net().cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    device = torch.device("cuda", torch.cuda.current_device())
    return StepBody(model, programs.loss_fn, optimizer, Plan(), None, clip_norm=1.0, device=device)


@pytest.mark.parametrize(
    "name",
    ["SGD", "Adam", "AdamW", "Adamax", "Adadelta", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"],
)  # fmt: skip
def test_clean_step(programs: ModuleType, name: str) -> None:
    """A clean step has no finding in any capturable optimizer, and leaves its settings as they were."""
    body = make_body(programs, name, lr=0.1)
    batch = tuple(leaf.cuda() for leaf in BATCH)
    before = {
        key: value for key, value in body.optimizer.param_groups[0].items() if key != "params"
    }
    lint = inspect_step(body, batch, device="cuda")
    assert lint == Lint((), ())
    group = body.optimizer.param_groups[0]
    assert {key: value for key, value in group.items() if key != "params"} == before


def test_rate_read_by_the_optimizer(programs: ModuleType) -> None:
    """On a GPU, too, an optimizer that reads its learning rate is named by its settings."""
    body = make_body(programs, "RMSprop", lr=0.1, foreach=False)
    lint = inspect_step(body, tuple(leaf.cuda() for leaf in BATCH), device="cuda")
    assert [one.rule for one in lint.optimizer] == ["rate-read"]


def test_failed_capture_in_a_child(programs: ModuleType) -> None:
    """The failed capture stays in the child; this process can still capture."""
    bad = try_in_child(programs.capture, {"reads": True})
    assert bad.status == "failed"
    assert "captur" in bad.text
    assert try_in_child(programs.capture, {"reads": False}).status == "ok"
    programs.capture(reads=False)


def test_no_fused_form_on_gpus(programs: ModuleType) -> None:
    """An optimizer whose fused form is for CPUs alone is a finding."""
    lint = inspect_step(
        make_body(programs, "Adagrad"), tuple(x.cuda() for x in BATCH), device="cuda"
    )
    assert [one.rule for one in lint.optimizer][:1] == ["optimizer"]
    assert lint.findings == ()


def test_step_in_a_child(programs: ModuleType) -> None:
    """A whole captured step runs in a child, and the parent's parameters stay."""
    body = make_body(programs, "AdamW", lr=0.1)
    before = body.model.layer.weight.clone()
    outcome = try_step_in_child(body, tuple(leaf.cuda() for leaf in BATCH), Plan(execution="graph"))
    assert outcome.status == "ok", outcome
    assert torch.equal(body.model.layer.weight, before)
