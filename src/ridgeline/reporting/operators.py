"""Operators of a step gathered into kinds: how often, how much work, how long, bound by what."""

from collections.abc import Iterable, Mapping, Sequence

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.machine import Machine, Setting
from ridgeline.reporting.grid import Grid
from ridgeline.simulator.pricing.costs import op_seconds
from ridgeline.timeline import Span, Timeline
from ridgeline.workload import Op, Phase, Workload


class OpTime(Value, frozen=True, kw_only=True):
    """Seconds of one operator and what limits it."""

    seconds: float
    bound: str


MOST_OPS = 15
"""Kinds of operators that are shown; the saved workload has all."""


class OpGroup(Value, frozen=True, kw_only=True):
    """Equal operators (same `Op.key`) of one phase, summed over their `count` occurrences."""

    name: str
    phase: Phase
    family: str
    dtype: str
    modules: tuple[str, ...]
    count: int
    flops: int
    num_bytes: int
    seconds: float
    """0.0 when no time is known."""
    bound: str

    @property
    def intensity(self) -> float:
        """FLOP per byte moved; 0 for operators that move nothing."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    @property
    def rate(self) -> float:
        """FLOP per second; 0 when no time is known."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def where(self) -> str:
        """The module, or how many there are."""
        if len(self.modules) <= 1:
            return self.modules[0] if self.modules else ""
        return f"{self.modules[0]} and {len(self.modules) - 1} more"


def operators_grid(groups: Sequence[OpGroup], title: str) -> Grid:
    """The first groups, with times and what bounds them where these are known; nothing is counted as ""."""
    total = sum(group.seconds for group in groups)
    head = ("Operator", "Phase", "Module", "Count", "FLOP", "Moved", "FLOP/B")
    rows = tuple(
        (
            group.name,
            group.phase,
            group.where,
            str(group.count),
            units.quantity(group.flops, "FLOP") if group.flops else "",
            units.num_bytes(group.num_bytes),
            units.digits3(group.intensity) if group.flops else "",
            *(_timed(group, total) if total else ()),
        )
        for group in groups[:MOST_OPS]
    )
    timed = ("Time", "Share", "Bound by") if total else ()
    return Grid(title, (*head, *timed), rows, right=(3, 4, 5, 6, 7, 8))


def _timed(group: OpGroup, total: float) -> tuple[str, str, str]:
    return units.seconds(group.seconds), units.percent(group.seconds / total), group.bound


def times_from_timeline(workload: Workload, timeline: Timeline) -> dict[int, OpTime]:
    """Op index to its time, from the operator spans that a predicted timeline carries.

    The spans name their operator by the attribute `op` (index into `workload.ops`), those of fused
    operators all of them by `ops`, and are shared out by the bytes that each would move alone. Spans of
    one operator are summed, as several micro-batches repeat it, and divided by their number.
    """
    spans: dict[int, list[tuple[Span, float]]] = {}
    for span in timeline.spans:
        for index, share in _shares(workload, span) if span.detail else ():
            spans.setdefault(index, []).append((span, share))
    return {
        index: OpTime(
            seconds=sum(s.duration_ns * share for s, share in found) * 1e-9 / len(found),
            bound=str(found[0][0].attributes.get("bound", "")),
        )
        for index, found in spans.items()
    }


def _shares(workload: Workload, span: Span) -> list[tuple[int, float]]:
    """The operators that a span stands for, with the share of it that each gets."""
    index, fused = span.attributes.get("op"), span.attributes.get("ops", "")
    members = [index] if isinstance(index, int) else [int(word) for word in str(fused).split()]
    # A timeline from a file may belong to another trace.
    members = [i for i in members if 0 <= i < len(workload.ops)]
    moved = [workload.ops[i].bytes_moved for i in members]
    total = sum(moved)
    # Views move nothing; they get equal shares.
    if not total:
        return [(i, 1.0 / len(members)) for i in members]
    return [(i, size / total) for i, size in zip(members, moved, strict=True)]


def times_on_machine(workload: Workload, machine: Machine, setting: Setting) -> dict[int, OpTime]:
    """Op index to its time as the cost model has it for one setting of a machine.

    Raises:
        MachineError: the profile lacks a ceiling that an operator needs.
    """
    # Equal operators are priced once, of which a step has hundreds.
    known: dict[str, OpTime] = {}
    result: dict[int, OpTime] = {}
    for index, op in enumerate(workload.ops):
        # By phase as well, since issuing costs differ between them.
        key = f"{op.phase}:{op.key}"
        if key not in known:
            cost = op_seconds(machine, op, setting)
            known[key] = OpTime(seconds=cost.seconds, bound=cost.bound)
        result[index] = known[key]
    return result


def group_ops(workload: Workload, times: Mapping[int, OpTime]) -> tuple[OpGroup, ...]:
    """The operators gathered by phase and key, longest first; without times, most work first."""
    members: dict[tuple[str, str], list[int]] = {}
    for index, op in enumerate(workload.ops):
        # By phase as well: what forward runs the optimizer may run, too.
        members.setdefault((op.phase, op.key), []).append(index)
    groups = [
        _group([workload.ops[i] for i in found], [times[i] for i in found if i in times])
        for found in members.values()
    ]
    # Down to the name, so that equal runs give equal pages.
    return tuple(sorted(groups, key=lambda g: (-g.seconds, -g.flops, -g.num_bytes, g.name)))


def seconds_by(groups: Iterable[OpGroup], field: str) -> dict[str, float]:
    """Summed seconds by a field of the groups (`bound`, `family`, ...), largest first."""
    totals: dict[str, float] = {}
    for group in groups:
        name = str(getattr(group, field))
        totals[name] = totals.get(name, 0.0) + group.seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def short_name(name: str) -> str:
    """`aten.convolution.default` as people say it: `convolution`."""
    parts = name.replace("::", ".").split(".")
    parts = parts[1:] if parts[0] == "aten" and len(parts) > 1 else parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "default" else parts)


def _group(ops: list[Op], times: list[OpTime]) -> OpGroup:
    first = ops[0]
    return OpGroup(
        name=short_name(first.name),
        phase=first.phase,
        family=first.family,
        dtype=first.dtype,
        modules=tuple(dict.fromkeys(op.module for op in ops if op.module)),
        count=len(ops),
        flops=sum(op.flops for op in ops),
        num_bytes=sum(op.bytes_moved for op in ops),
        seconds=sum(time.seconds for time in times),
        # Operators with equal keys are priced alike, and so bound alike.
        bound=times[0].bound if times else "",
    )
