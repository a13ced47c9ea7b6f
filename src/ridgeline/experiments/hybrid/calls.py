"""The contenders of inference: the same module behind every kind of call. All run under `no_grad`."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ridgeline.execution import MODES, offered
from ridgeline.experiments.contests import as_written, captured, scripted
from ridgeline.experiments.hybrid.cases import HybridCase
from ridgeline.experiments.hybrid.entrant import Contender, Entrant, Inputs, Make, Remarks
from ridgeline.experiments.hybrid.result import BASE
from ridgeline.plan import Execution

PRIORITY: tuple[Execution, ...] = (
    "eager",
    "graph",
    "script",
    "compiled+graph",
    "compiled",
    "packaged",
    "regional+graph",
    "regional",
)
NUM_COPIES = 2048
"""Addresses that inputs come from in turn, where none comes again soon."""
LEAST_BUDGET_S = 30.0
"""`auto` gets what is left of the case's time, and at least this."""


def call_contenders(case: HybridCase) -> list[Contender]:
    """Those to be made first are first, since a time limit may leave out the last."""
    modes = sorted(offered("callable", case.device), key=PRIORITY.index)
    ours = [_contender(mode) for mode in modes]
    if case.device == "cuda":
        replayed = [mode for mode in modes if MODES[mode].is_replayed]
        ours += [_contender(mode, static_io=True) for mode in replayed]
        if case.model == "mlp":  # where an address is worth a figure in what a call takes
            ours += [_elsewhere(mode) for mode in replayed]
        ours.append(Contender("bare graph replay", "bound", 0, bare_replay))
    return [
        Contender(BASE, "peer", 0, partial(_peer, as_written)),
        Contender("torch.jit.script", "peer", 0, partial(_peer, scripted)),
        # What compiles comes behind all that does not, and what searches last.
        *(contender for contender in ours if not contender.compilations),
        Contender("torch.compile", "peer", 1, partial(_peer, torch.compile)),
        Contender("reduce-overhead", "peer", 1, partial(_peer, _reducing_overhead)),
        *(contender for contender in ours if contender.compilations),
        Contender("ridgeline auto", "ridgeline", 2, _ours("auto")),
    ]


def _contender(mode: Execution, *, static_io: bool = False) -> Contender:
    name = f"ridgeline {mode}{', static_io' if static_io else ''}"
    made = _ours(mode, static_io=static_io)
    return Contender(name, "ridgeline", int(MODES[mode].is_compiled), made)


def _elsewhere(mode: Execution) -> Contender:
    """Each call with inputs at another address than the calls before."""

    def make(case: HybridCase, budget_s: float) -> Entrant:
        entrant = _ours(mode)(case, budget_s)
        # With the inputs themselves, so that their ids stay theirs.
        given: dict[int, tuple[Inputs, Iterator[Inputs]]] = {}

        def run(inputs: Inputs) -> Any:
            if id(inputs) not in given:
                copies = [tuple(x.clone() for x in inputs) for _ in range(NUM_COPIES)]
                given[id(inputs)] = inputs, itertools.cycle(copies)
            return entrant.run(next(given[id(inputs)][1]))

        return replace(entrant, run=run)

    compilations = int(MODES[mode].is_compiled)
    return Contender(f"ridgeline {mode}, inputs elsewhere", "ridgeline", compilations, make)


def _reducing_overhead(model: nn.Module) -> Any:
    return torch.compile(model, mode="reduce-overhead")


def _peer(wrap: Callable[[nn.Module], Any], case: HybridCase, budget_s: float) -> Entrant:
    model = case.model_on_device()
    called = wrap(model)
    return Entrant(model=model, run=lambda inputs: called(*inputs))


def _ours(mode: Execution | Literal["auto"], *, static_io: bool = False) -> Make:
    def make(case: HybridCase, budget_s: float) -> Entrant:
        from ridgeline.callables.hybridize import hybridize

        model = case.model_on_device()
        example = case.batches()[0]
        # Without knowing how often it will be called, `auto` looks for the fastest, however long it compiles.
        hybrid = hybridize(
            model, example, mode=mode, budget_s=max(LEAST_BUDGET_S, budget_s), static_io=static_io
        )

        def remarks() -> Remarks:
            return Remarks(hybrid.mode if mode == "auto" else "", hybrid.report.notes)

        return Entrant(
            model=model,
            run=(lambda inputs: hybrid()) if static_io else (lambda inputs: hybrid(*inputs)),
            load=(lambda inputs: _load(hybrid.inputs, inputs)) if static_io else None,
            close=hybrid.close,
            remarks=remarks,
        )

    return make


def bare_replay(case: HybridCase, budget_s: float) -> Entrant:
    """The module's kernels captured once and launched as one graph: no inputs move, nothing is kept."""
    model = case.model_on_device()
    statics = case.batches()[0]
    graph, output = captured(lambda: model(*statics))

    # Its argument is not read: `load` has written the inputs where the graph reads them.
    def run(inputs: Inputs) -> Any:
        graph.replay()
        return output

    return Entrant(model=model, run=run, load=partial(_load, statics))


def _load(statics: Inputs, inputs: Inputs) -> None:
    """Write inputs where a program that takes none reads them."""
    for static, given in zip(statics, inputs, strict=True):
        static.copy_(given)
