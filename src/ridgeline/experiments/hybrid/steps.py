"""The contenders of training: the same step, forward to optimizer, executed in every way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ridgeline.execution import MODES, offered
from ridgeline.experiments.contests import as_written, scripted
from ridgeline.experiments.hybrid.cases import HybridCase
from ridgeline.experiments.hybrid.entrant import Contender, Entrant, Make, Remarks
from ridgeline.experiments.hybrid.result import BASE
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.plan import Execution, Plan

PRIORITY: tuple[Execution, ...] = (
    "eager",
    "graph",
    "packaged",
    "compiled+graph",
    "step-graph",
    "regional+graph",
    "compiled",
    "regional",
    "model-graph",
    "compiled+model-graph",
)
LONG_RUN = 100_000
"""Steps that `auto` expects: a run in which compiling is earned back, or never is."""
SEARCHED = 4
"""Compilations of `auto`, which tries the best of the plans."""


def step_contenders(case: HybridCase) -> list[Contender]:
    """Those to be made first are first, since a time limit may leave out the last."""
    modes = sorted(offered("step", case.device), key=PRIORITY.index)
    ours = [
        Contender(f"ridgeline {mode}", "ridgeline", int(MODES[mode].is_compiled), _planned(mode))
        for mode in modes
    ]
    return [
        Contender(BASE, "peer", 0, _plain(as_written)),
        Contender("eager + fused optimizer", "peer", 0, _plain(as_written, fused=True)),
        Contender("torch.jit.script", "peer", 0, _plain(scripted)),
        *(contender for contender in ours if not contender.compilations),
        Contender("torch.compile", "peer", 1, _plain(torch.compile)),
        Contender("torch.compile + fused", "peer", 1, _plain(torch.compile, fused=True)),
        *(contender for contender in ours if contender.compilations),
        Contender("reduce-overhead", "peer", 1, _reducing_overhead),
        Contender("ridgeline auto", "ridgeline", SEARCHED, _auto),
    ]


def _plain(wrap: Callable[[nn.Module], Any], *, fused: bool = False, begin: Any = None) -> Make:
    def make(case: HybridCase, budget_s: float) -> Entrant:
        model = case.model_on_device()
        optimizer = case.make_optimizer(model, **({"fused": True} if fused else {}))
        step = PlainStep(
            model, wrap(model), case.loss_fn, optimizer, precision=case.precision, begin=begin
        )
        return Entrant(model=model, run=step)

    return make


def _reducing_overhead(case: HybridCase, budget_s: float) -> Entrant:
    # Without the mark, graphs of one step may overwrite what the backward pass of another still needs.
    begin = torch.compiler.cudagraph_mark_step_begin
    return _plain(partial(torch.compile, mode="reduce-overhead"), begin=begin)(case, budget_s)


def _planned(execution: Execution) -> Make:
    def make(case: HybridCase, budget_s: float) -> Entrant:
        return _ours(case, Plan(execution=execution, precision=case.precision, kernels="combined"))

    return make


def _auto(case: HybridCase, budget_s: float) -> Entrant:
    return _ours(case, "auto")


def _ours(case: HybridCase, plan: Plan | str) -> Entrant:
    """Ridgeline's step, with the fused optimizer where that is what its strongest rival takes."""
    from ridgeline.session import TrainStep

    model = case.model_on_device()
    options = {"fused": True} if case.device == "cuda" else {}
    optimizer = case.make_optimizer(model, **options)
    # What the rivals may do: without it a plan in bf16 would be refused.
    allowed = () if case.precision == "as-is" else (case.precision,)
    step = TrainStep(
        model,
        case.loss_fn,
        optimizer,
        plan,
        allow=allowed,
        device=case.device,
        steps=LONG_RUN,
        name=case.model,
    )

    def remarks() -> Remarks:
        if step.ranking is None:
            return Remarks(notes=step.notes)
        return Remarks(repr(step.plan), (*step.ranking.notes, *step.notes))

    return Entrant(model=model, run=step, close=step.close, remarks=remarks)
