"""Sparse gradients beside dense ones: a synchronizer around a reducer, which has the dense ones.

Layers with `sparse=True` (see `sparse_modules`) have gradients of a few rows, of another number in each step,
which no bucket can hold. They are exchanged when the buckets are (see `sparse_exchange`), whatever the plan's
algorithm and compression. A forward pass begins with its tables, so their gradients come last, and there is
nothing left of backward to hide behind.

torch's DistributedDataParallel finds such parameters by the same layers, over gloo alone, and fails where a
worker does not use one or where its gradient is dense.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ridgeline.execution import rows_refusal
from ridgeline.optimizer_forms import sparse_modules
from ridgeline.plan import Plan
from ridgeline.runtime.sync.around_reducer import AroundReducer
from ridgeline.runtime.sync.buckets.coverage import Coverage
from ridgeline.runtime.sync.collectives import exchange_frame
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.sparse.sparse_exchange import SparseExchange
from ridgeline.synchronisation import DEFAULT_ALGORITHM, SPARSE_ROWS, UNCOMPRESSED
from ridgeline.workers import attendance
from ridgeline.workers.world import World

NO_DENSE = "no dense parameter"
"""Stands in the first bucket, which carries what workers send each other, where a model has none."""


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters whose gradients may be sparse rows, by their (first) names."""
    held = {model.get_parameter(f"{name}.weight".lstrip(".")) for name in sparse_modules(model)}
    return {name: p for name, p in model.named_parameters() if p in held and p.requires_grad}


def dense_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]],
    sparse: Mapping[str, nn.Parameter],
    device: torch.device,
) -> list[tuple[str, nn.Parameter]]:
    """What a reducer is given: all but the sparse ones, and one of its own where none of them is trained."""
    found = [(name, p) for name, p in parameters if name not in sparse]
    if not any(p.requires_grad for _, p in found):
        found.append((NO_DENSE, nn.Parameter(torch.zeros(1, device=device))))
    return found


def check_rows(plan: Plan, device: str, names: Sequence[str]) -> None:
    """Refuse a plan that cannot exchange sparse gradients, before anything trains.

    Args:
        plan: Of the step.
        device: `cpu` or `cuda`.
        names: Parameters with sparse gradients; none is fine under any plan.

    Raises:
        PlanError: names the first of them, and what to do.
    """
    refused = rows_refusal(plan, device, names[0]) if names else None
    if refused is not None:
        raise refused.error


def rows_note(plan: Plan, names: Sequence[str]) -> str:
    """What a plan's words do not say of parameters with sparse gradients; empty where they say nothing."""
    sync = plan.sync
    if sync.algorithm == DEFAULT_ALGORITHM and sync.compression == UNCOMPRESSED:
        return ""
    return (
        f"sparse gradients ({', '.join(names)}) are exchanged as they are, by an all-gather of their rows: "
        f"sync.algorithm={sync.algorithm!r} and sync.compression={sync.compression!r} are for the others"
    )


class SparseGradients(AroundReducer):
    """Exchanges dense gradients by a reducer, and then sparse ones; a `Synchronizer`.

    Args:
        model: All of its parameters are known.
        reducer: Averages all but the sparse ones.
        exchange: Averages these.
        world: This worker's place; size at least 2.

    Attributes:
        overhead_ns: As of the reducer.
    """

    def __init__(
        self, model: nn.Module, *, reducer: Reducer, exchange: SparseExchange, world: World
    ) -> None:
        super().__init__(reducer)
        self._coverage = Coverage([*model.named_parameters()])
        self._exchange, self._world = exchange, world

    @property
    def sent_bytes(self) -> int:
        """Of the sparse gradients that this worker has handed over so far."""
        return self._exchange.sent_bytes

    def finish(self) -> None:
        """Wait for the means of dense gradients, then exchange the sparse ones.

        Raises:
            WorkloadError: see `Reducer.finish`.
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.
            EngineError: a collective failed otherwise.

        Cost: See `SparseExchange.exchange`: waits for the device.
        """
        # Dense ones first, on every worker: two collectives in another order would wait for each other.
        self._reducer.finish()
        together = attendance.meeting(SPARSE_ROWS, self._world)
        with exchange_frame(self._recorder, SPARSE_ROWS), torch.no_grad(), together:
            self._exchange.exchange()
        self.overhead_ns = self._reducer.overhead_ns

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See `Synchronizer`; no parameter may require a gradient now that did not when the step was made."""
        self._coverage.check_frozen()
        self._coverage.check_groups(groups)
