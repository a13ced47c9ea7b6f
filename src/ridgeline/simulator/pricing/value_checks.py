"""Operators by which a step looks at values and does nothing else: checks of distributions' arguments.

Eager steps have them, and wait for the device at each; captured and compiled ones leave them out (see the
runtime's `unchecked`), with all that is computed for them alone.
"""

from ridgeline.simulator.pricing.dataflow import operator_name
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.workload import Op, Workload

_ASKS = "_is_all_true"
"""What `torch.distributions` asks of each constraint. Source: torch/distributions/distribution.py."""
_READS = "_local_scalar_dense"
_PURE = ("elementwise", "reduction", "view")
"""Families of operators that are not missed where nobody takes their result."""


@kept_by_identity(16)
def value_checks(workload: Workload) -> frozenset[int]:
    """Indices of the operators that only check values; found once and kept."""
    ops = workload.ops
    users: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for other in op.dependencies:
            users.setdefault(other, []).append(index)
    asking = {index for index, op in enumerate(ops) if operator_name(op) == _ASKS}
    found = asking | {
        index
        for index, op in enumerate(ops)
        if operator_name(op) == _READS and asking.intersection(op.dependencies)
    }
    # Backwards, so that whoever takes a result was judged before it.
    for index in range(len(ops) - 1, -1, -1):
        taken = users.get(index, [])
        if asking and taken and found.issuperset(taken) and _is_pure(ops[index]):
            found.add(index)
    return frozenset(found)


def _is_pure(op: Op) -> bool:
    """Whether an operator leaves nothing but its result."""
    written = any(spec.role != "activation" for spec in op.outputs)
    return op.family in _PURE and not written and not operator_name(op).endswith("_")
