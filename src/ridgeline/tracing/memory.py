"""Live memory over a step, from the lifetimes of its storages."""

from collections.abc import Sequence

from ridgeline.tracing.storages import Lifetime
from ridgeline.workload import MemoryPoint, Role

_CATEGORY: dict[Role, int] = {
    "parameter": 0,
    "buffer": 0,
    "gradient": 1,
    "state": 2,
    "activation": 3,
    "batch": 3,
}


def memory_points(lifetimes: Sequence[Lifetime], num_ops: int) -> tuple[MemoryPoint, ...]:
    """Live bytes right after each op.

    A storage counts from the op that made it to the last op before it was freed. Buffers count with
    the parameters (both are the model), the batch with the activations; a gradient counts as such
    from the op that made it, though it reaches `.grad` some ops later.
    """
    changes = [[0, 0, 0, 0] for _ in range(num_ops + 1)]
    for lifetime in lifetimes:
        start = max(lifetime.birth, 0)
        end = min(lifetime.death, num_ops)
        if end > start:
            category = _CATEGORY[lifetime.role]
            changes[start][category] += lifetime.num_bytes
            changes[end][category] -= lifetime.num_bytes
    live = [0, 0, 0, 0]
    points = []
    for op in range(num_ops):
        live = [old + change for old, change in zip(live, changes[op], strict=True)]
        points.append(
            MemoryPoint(
                op=op,
                parameter_bytes=live[0],
                gradient_bytes=live[1],
                state_bytes=live[2],
                activation_bytes=live[3],
            )
        )
    return tuple(points)
