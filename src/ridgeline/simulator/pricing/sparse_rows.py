"""Sparse gradients in a traced step: which there are, of how many rows, and what exchanging these takes.

A trace has no values, so it knows how many rows a gradient is made of and not how many of these are the same:
it has one for each number that the batch looks up. All are taken to differ, which is the most that travels.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ridgeline.execution import RowsRefusal, rows_refusal
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.pricing.dataflow import element_bytes
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.synchronisation import RowsToSend, trains_apart
from ridgeline.workload import Op, Parameter, TensorSpec, Workload

_MAKERS = ("_sparse_coo_tensor_with_dims_and_tensors", "_embedding_bag_backward")
"""What makes a sparse gradient, as torch 2.11 to 2.13 trace `nn.Embedding` and `nn.EmbeddingBag`."""


class SparseGradient(NamedTuple):
    """A gradient that travels by its rows, or one that is sparse and cannot.

    Attributes:
        parameter: Whose gradient it is.
        num_rows: Different rows at most; 0 where something else than its layer makes it dense.
        is_layers: Whether it is the weight of a layer with `sparse=True`; the runtime knows no others.
    """

    parameter: Parameter
    num_rows: int
    is_layers: bool

    @property
    def to_send(self) -> RowsToSend:
        """What each worker has of it."""
        each = element_bytes(self.parameter.dtype)
        row_bytes = prod(self.parameter.shape[1:]) * each
        return RowsToSend(
            self.num_rows, row_bytes, 0 if self.num_rows else self.parameter.num_bytes
        )


@kept_by_identity(64)
def sparse_gradients(workload: Workload) -> tuple[SparseGradient, ...]:
    """The sparse gradients of a step, in the order of its parameters; found once and kept."""
    made: dict[tuple[str, tuple[int, ...]], int] = {}
    for op in workload.ops:
        if op.phase == "backward" and any(maker in op.name for maker in _MAKERS):
            for spec in filter(_is_sparse, op.outputs):
                key = (op.module, spec.shape)
                made[key] = made.get(key, 0) + _num_looked_up(op)
    if not made:
        return ()
    found = []
    for parameter in workload.parameters:
        module, _, leaf = parameter.name.rpartition(".")
        # Only `weight`: it is what both layers with `sparse=True` call their table.
        rows = made.get((module, parameter.shape), 0) if leaf == "weight" else 0
        ends_sparse = _ends_sparse(workload, parameter)
        if parameter.is_trainable and (rows or ends_sparse):
            known = min(rows, parameter.shape[0]) if ends_sparse else 0
            found.append(SparseGradient(parameter, known, is_layers=rows > 0))
    return tuple(found)


def sent_by_rows(workload: Workload, sync: Sync) -> tuple[SparseGradient, ...]:
    """Those that no bucket holds: none where parameters are exchanged, and not gradients."""
    return () if trains_apart(sync) else sparse_gradients(workload)


def rows_refused(workload: Workload, plan: Plan) -> RowsRefusal | None:
    """Why the workers of a plan could not exchange a sparse gradient of the step; None where they can."""
    if plan.workers == 1:
        return None
    for gradient in sent_by_rows(workload, plan.sync):
        name = gradient.parameter.name
        if not gradient.is_layers:
            return RowsRefusal(
                f"has a sparse gradient for {name}, which is not the weight of an nn.Embedding or "
                "nn.EmbeddingBag with sparse=True: workers exchange no others",
                "use one of these, make it dense, or use one worker",
            )
        refused = rows_refusal(plan, workload.device, name)
        if refused is not None:
            return refused
    return None


def check_rows(workload: Workload, plan: Plan) -> None:
    """Refuse to predict what cannot run.

    Raises:
        PlanError: see `rows_refused`.
    """
    refused = rows_refused(workload, plan)
    if refused is not None:
        raise refused.error


def rows_note(gradients: Sequence[SparseGradient]) -> str:
    """What is assumed of them."""
    counts = ", ".join(
        f"{g.num_rows} rows of {g.parameter.name}" if g.num_rows else f"all of {g.parameter.name}"
        for g in gradients
    )
    return f"assumed of sparse gradients: each worker sends {counts}, as if no number came twice in its batch"


def _is_sparse(spec: TensorSpec) -> bool:
    return bool(spec.shape) and not spec.stride


def _ends_sparse(workload: Workload, parameter: Parameter) -> bool:
    """Whether the op that completes the gradient deals in a tensor of its shape without strides."""
    if parameter.ready_op < 0:
        return False
    op = workload.ops[parameter.ready_op]
    return any(_is_sparse(s) and s.shape == parameter.shape for s in (*op.inputs, *op.outputs))


def _num_looked_up(op: Op) -> int:
    """The numbers of rows that an op makes a gradient of: the first integers that it is given."""
    integers = (spec for spec in op.inputs if spec.dtype in ("int64", "int32"))
    numbers = next(integers, None)
    return 0 if numbers is None else prod(numbers.shape)
