"""What a compiled backward pass computes again, where that moves less than storing it in the forward pass.

Elementwise results that only backward wants are not written: backward reads what they were made of, mostly
the narrow result of a matrix product in place of several wide tensors, and computes them on its way. The
logarithm of a softmax over a vocabulary is the largest such tensor of a language model.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ridgeline.simulator.pricing.dataflow import (
    DataFlow,
    Source,
    data_flow,
    operator_name,
    spec_bytes,
)
from ridgeline.workload import Op, Workload

_BY_ROWS = ("_log_softmax",)
"""Normalisations of rows that are elementwise once a number for each row is there, which is stored."""
MOST_ROOTS = 4
"""A result of more tensors (a residual stream) is stored. Source: `ban_if_long_fusible_chains` and
`ban_if_used_far_apart` in torch/_functorch/config.py keep the compiler from following it."""

Root = tuple[int, int, int]
"""What a chain starts from: (operator, its output, 0), or (operator, its input that has no source, 1)."""


class Saved(NamedTuple):
    """Bytes that recomputing spares: the forward pass does not write them, and backward reads others.

    `written` by forward operator; `read` by backward operator, what it reads less (negative: more).
    """

    written: Mapping[int, int]
    read: Mapping[int, int]


def recomputed(
    workload: Workload, runs: Sequence[Collection[int]], is_loop: Callable[[Op], bool]
) -> Saved:
    """What is computed again in the backward pass of a compiled step.

    `runs` are the operators of each kernel of the compiler's own; `is_loop` says whether it writes one as a
    loop.

    Source: the partitioner of torch/_functorch/partitioners.py, which cuts between the passes where the
        fewest bytes cross and recomputes only what fuses.
    """
    ops, flow = workload.ops, data_flow(workload)
    chains = _chains(ops, flow, is_loop)
    needs = _Needs(ops, flow, runs, is_loop)
    read: Counter[int] = Counter()
    again: set[Source] = set()
    stored: set[Source] = set()
    for run in runs:
        first = min(run)
        if ops[first].phase != "backward":
            continue  # a run lies within one phase, so its first operator tells which
        taken = {s for i in run for s in flow.sources[i] if s and ops[s[0]].phase == "forward"}
        passed_on = {s: chains[s[0]] for s in taken if needs.is_passed_on(s)}
        for group in _groups({s: roots for s, roots in passed_on.items() if roots}):
            # What backward reads anyway costs nothing to compute from.
            # Without those of the group itself, which would no longer be there to be read.
            others = {(*source, 0) for source in taken - group.keys()}
            roots = frozenset().union(*group.values()) - others
            more = sum(_root_bytes(ops, root) for root in roots)
            if more < sum(needs.stored_bytes(source) for source in group):
                read[first] += sum(_size(ops, s) for s in group) - more
                again |= group.keys()
            else:
                stored |= group.keys()
    written: Counter[int] = Counter()
    # One kernel that reads it from memory is enough for it to be written.
    for source in again - stored:
        if needs.is_for_backward(source):
            written[source[0]] += _size(ops, source)
    return Saved(written, read)


class _Needs:
    """Who wants a result of the forward pass in memory."""

    def __init__(
        self,
        ops: Sequence[Op],
        flow: DataFlow,
        runs: Sequence[Collection[int]],
        is_loop: Callable[[Op], bool],
    ) -> None:
        self._ops = ops
        self._flow = flow
        self._is_loop = is_loop
        self._run = {index: number for number, run in enumerate(runs) for index in run}

    def is_for_backward(self, source: Source) -> bool:
        """Whether none but loops of the backward pass do, besides the kernel that makes it."""
        mine = self._run.get(source[0])
        return all(
            (self._is_loop(self._ops[user]) and self._ops[user].phase == "backward")
            or (mine is not None and self._run.get(user) == mine)
            for user in self._flow.users.get(source, ())
        )

    def is_passed_on(self, source: Source) -> bool:
        """Whether the forward pass goes on with it; else it is one of its results."""
        users = self._flow.users.get(source, ())
        return any(self._ops[user].phase == "forward" for user in users)

    def stored_bytes(self, source: Source) -> int:
        """Bytes that storing it for backward moves: it is read, and written where only backward wants it."""
        return _size(self._ops, source) * (2 if self.is_for_backward(source) else 1)


def _chains(
    ops: Sequence[Op], flow: DataFlow, is_loop: Callable[[Op], bool]
) -> list[frozenset[Root] | None]:
    """What each operator is made of; None where it cannot be computed again, or is made of too much."""
    known: list[frozenset[Root] | None] = []
    # In order, so that chains are found from their beginnings on: what an operator takes was made before it.
    for index, op in enumerate(ops):
        found: set[Root] = set()
        for position, source in enumerate(flow.sources[index]):
            beyond = None if source is None else known[source[0]]
            if source is None:
                found.add((index, position, 1))
            else:
                found |= {(*source, 0)} if beyond is None else beyond
        # Random numbers drawn again would be others; what was written in place is gone.
        is_again = op.phase == "forward" and is_loop(op) and _is_elementwise(op)
        known.append(frozenset(found) if is_again and 0 < len(found) <= MOST_ROOTS else None)
    return known


def _root_bytes(ops: Sequence[Op], root: Root) -> int:
    op, number, is_input = root
    return spec_bytes((ops[op].inputs if is_input else ops[op].outputs)[number])


def _is_elementwise(op: Op) -> bool:
    if op.draws_random or operator_name(op).endswith("_"):
        return False
    return op.family in ("elementwise", "copy") or operator_name(op) in _BY_ROWS


def _groups(roots: Mapping[Source, frozenset[Root]]) -> list[dict[Source, frozenset[Root]]]:
    """Results that have roots in common, together."""
    groups: list[dict[Source, frozenset[Root]]] = []
    for source, mine in sorted(roots.items()):
        joined = {source: mine}
        apart = []
        for group in groups:
            if mine & frozenset().union(*group.values()):
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups


def _size(ops: Sequence[Op], source: Source) -> int:
    return spec_bytes(ops[source[0]].outputs[source[1]])
