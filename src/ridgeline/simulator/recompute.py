"""What a compiled backward pass computes again instead of reading: cheap results of the forward pass.

The compiler cuts a step where the fewest bytes cross from forward to backward. What elementwise operators
make from tensors that are kept anyway is not written by forward, but made again by the kernel that needs it.
"""

from collections.abc import Callable, Sequence

from ridgeline.simulator.dataflow import DataFlow, Source, spec_bytes
from ridgeline.simulator.runs import Run
from ridgeline.workload import Op, TensorSpec

RECOMPUTED = ("elementwise", "copy")
"""Families whose results are made again. Source: assumed; the min-cut partitioner bans only what computes or
draws random numbers (torch/_functorch/partitioners.py), and reductions mostly."""


def recomputed(ops: Sequence[Op], flow: DataFlow, runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs, where backward reads what forward read instead of what it made, if those are fewer bytes.

    Args:
        ops: Of the step.
        flow: Its data flow.
        runs: Those of forward and backward; each stays what it is but for its bytes.

    Returns:
        Runs of the same operators, of the same bytes or fewer in all.
    """
    run_of = {index: number for number, run in enumerate(runs) for index in run.ops}
    read = [run.bytes_read for run in runs]
    written = [run.bytes_written for run in runs]
    for number, run in enumerate(runs):
        if ops[run.ops[0]].phase != "forward":
            continue
        made = _cheap(ops, flow, run, run_of.__contains__)
        takers = {run_of[user] for source in made for user in flow.users[source]} - {number}
        given = _given(ops, flow, run)
        saved = {
            taker: sum(
                spec_bytes(_spec(ops, source))
                for source in made
                if any(run_of[user] == taker for user in flow.users[source])
            )
            for taker in takers
        }
        spared = sum(spec_bytes(_spec(ops, source)) for source in made)
        extra = {
            taker: sum(
                size for source, size in given.items() if not _reads(flow, runs[taker], source)
            )
            for taker in takers
        }
        if spared + sum(saved.values()) <= sum(extra.values()):
            continue
        written[number] = max(0, written[number] - spared)
        for taker in takers:
            read[taker] = max(0, read[taker] - saved[taker]) + extra[taker]
    return tuple(
        run._replace(bytes_read=read[number], bytes_written=written[number])
        for number, run in enumerate(runs)
    )


def _cheap(
    ops: Sequence[Op], flow: DataFlow, run: Run, is_joined: Callable[[int], bool]
) -> list[Source]:
    """Results of a run in forward that only kernels of backward need besides the run itself."""
    inside = set(run.ops)
    found = []
    for index in run.ops:
        if ops[index].family not in RECOMPUTED:
            continue
        for number, spec in enumerate(ops[index].outputs):
            users = [u for u in flow.users.get((index, number), ()) if u not in inside]
            is_backward = all(ops[user].phase == "backward" and is_joined(user) for user in users)
            if users and is_backward and spec.role == "activation":
                found.append((index, number))
    return found


def _given(ops: Sequence[Op], flow: DataFlow, run: Run) -> dict[Source, int]:
    """What a run reads of other operators' results, with its bytes."""
    inside = set(run.ops)
    return {
        source: spec_bytes(_spec(ops, source))
        for index in run.ops
        for source in flow.sources[index]
        if source is not None and source[0] not in inside
    }


def _reads(flow: DataFlow, run: Run, source: Source) -> bool:
    """Whether a run reads a result anyway."""
    return any(source in flow.sources[index] for index in run.ops)


def _spec(ops: Sequence[Op], source: Source) -> TensorSpec:
    return ops[source[0]].outputs[source[1]]
