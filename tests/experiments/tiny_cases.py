"""A tiny case and contenders for it, of which one thing may be wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.experiments.hybrid.calls import call_contenders
from ridgeline.experiments.hybrid.cases import HybridCase
from ridgeline.experiments.hybrid.contest import HybridContest
from ridgeline.experiments.hybrid.entrant import Contender, Entrant
from ridgeline.experiments.hybrid.result import CaseResult
from ridgeline.experiments.hybrid.steps import step_contenders


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def tiny(purpose: str, **changes: Any) -> HybridCase:
    def batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        x = torch.randn(4, 8, generator=generator)
        return (x,) if purpose == "callable" else (x, torch.arange(4) % 3)

    settings: dict[str, Any] = {
        "model": "tiny",
        "purpose": purpose,
        "title": "8-16-3",
        "device": "cpu",
        "make_model": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
        "make_batch": batch,
        "make_optimizer": sgd,
        "calls": 2,
        "threads": 1,
    }
    return HybridCase(**(settings | changes))


def contest(case: HybridCase, *contenders: Contender, limit_s: float = 30.0) -> CaseResult:
    return HybridContest(case, contenders, limit_s=limit_s, progress=lambda line: None).hold()


def eager(case: HybridCase) -> Contender:
    found = call_contenders(case) if case.purpose == "callable" else step_contenders(case)
    assert found[0].name == "eager"
    return found[0]


def calling(
    act: Callable[[nn.Module, Any], Any], name: str = "odd", *, compilations: int = 0, **more: Any
) -> Contender:
    """A contender of which one thing is wrong."""

    def make(case: HybridCase, budget_s: float) -> Entrant:
        model = case.model_on_device()
        return Entrant(model=model, run=lambda inputs: act(model, inputs), **more)

    return Contender(name, "ridgeline", compilations, make)


def fail(error: Exception) -> Any:
    raise error
