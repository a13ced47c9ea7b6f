"""What if: the same machine with faster links, more computing, or no dispatch cost."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from ridgeline.errors import MachineError
from ridgeline.machine import (
    Ceiling,
    CodecTiming,
    Collective,
    CurvePoint,
    Link,
    Machine,
    OperatorTiming,
    Quantity,
    SizePoint,
)
from ridgeline.simulator.pricing.costs import COMPUTE_FAMILIES, op_seconds
from ridgeline.workload import Workload

PARTS = ("compute", "memory", "dispatch", "links", "collectives", "stragglers")
ALIASES = {"launch": "dispatch", "communication": "collectives"}
"""Other words for parts, as people ask."""
WORDS = ", ".join((*PARTS, *ALIASES))
FREE = "free"
"""In the place of a factor: the largest."""
LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e9
"""Beyond these the numbers of a machine say nothing any more, and end in infinite times."""
_Tabled = TypeVar("_Tabled", Collective, Link, CodecTiming)


def parse_what_if(text: str) -> dict[str, float]:
    """The factors in a text such as `links=2x,compute=1.5x,communication=free`.

    `launch` is another word for `dispatch`, `communication` for `collectives`, and `free` is 1e9. Case and
    spaces do not count.

    Raises:
        MachineError: an unknown part, a factor that is no number between 1e-6 and 1e9, or a part twice.

    Example:
        >>> parse_what_if("links=2x,compute=1.5")
        {'links': 2.0, 'compute': 1.5}
        >>> parse_what_if("launch=free")
        {'dispatch': 1000000000.0}
    """
    factors: dict[str, float] = {}
    for item in text.split(","):
        word, _, told = item.lower().replace(" ", "").partition("=")
        part, factor = ALIASES.get(word, word), told
        try:
            value = MOST_FACTOR if factor == FREE else float(factor.removesuffix("x"))
        except ValueError:
            # Below the least factor, so that the check that follows refuses it with the same words.
            value = 0.0
        if part not in PARTS or not LEAST_FACTOR <= value <= MOST_FACTOR:
            raise MachineError(
                f"wanted PART=FACTORx with a part of {WORDS} and a factor from "
                f"{LEAST_FACTOR:g} to {MOST_FACTOR:g} or {FREE}, got {item.strip()!r} in the "
                "what-if; for example links=2x"
            )
        if part in factors:
            raise MachineError(
                f"wanted each part once, got {part} twice in the what-if {text!r}; give one factor"
            )
        factors[part] = value
    return factors


def what_if(
    machine: Machine, factors: Mapping[str, float], workload: Workload | None = None
) -> Machine:
    """The machine with parts of it `factor` times as fast.

    `compute` are the ceilings in FLOP/s, `memory` those in B/s and the tables of codecs, `dispatch` what
    issuing costs, `collectives` the tables of collectives and the links of a cluster, `links` these and the
    copies between host and device, `stragglers` how much devices differ. Operator timings follow what limits
    the operator, which the workload knows; without one they stay.

    Args:
        machine: The measured machine.
        factors: Part, or its other word, to factor; 2.0 is twice as fast.
        workload: Whose operators the timings belong to.

    Raises:
        MachineError: an unknown part, one twice, or a factor that is no number between 1e-6 and 1e9.
        LawError: a part of the machine is so slow already that its factor leaves no rate, or devices would
            differ by more than a law takes.
    """
    told = [f"{part}={float(factor)!r}" for part, factor in factors.items()]
    factors = parse_what_if(",".join(told)) if told else {}
    links = factors.get("links", 1.0)
    # A cluster's links carry its collectives, so both factors hold for these.
    collectives = links * factors.get("collectives", 1.0)
    text = ",".join(f"{part}={factor:g}x" for part, factor in factors.items())
    warnings = [*machine.warnings, f"not a real machine: what if {text}"]
    rates = {p: factors.get(p, 1.0) for p in ("compute", "memory", "dispatch")}
    if workload is None and machine.timings and any(f != 1.0 for f in rates.values()):
        warnings.append("operator timings were left as measured: no workload says what limits them")
    return msgspec.structs.replace(
        machine,
        # Another fingerprint, so that no cache takes it for the measured machine.
        fingerprint=f"{machine.fingerprint}?{text}",
        warnings=tuple(warnings),
        ceilings=tuple(_faster_ceiling(entry, rates) for entry in machine.ceilings),
        dispatch=tuple(
            msgspec.structs.replace(e, seconds=_scaled(e.seconds, 1 / rates["dispatch"]))
            for e in machine.dispatch
        ),
        collectives=_faster_tables(machine.collectives, collectives),
        cluster=tuple(level.times(collectives) for level in machine.cluster),
        stragglers=machine.stragglers.times(factors.get("stragglers", 1.0)),
        # Codecs move more than they compute, but for what each parameter and shape costs to issue.
        codecs=_faster_tables(machine.codecs, rates["memory"]),
        links=_faster_tables(machine.links, links),
        timings=_faster_timings(machine, rates, workload),
    )


def _faster_ceiling(entry: Ceiling, rates: Mapping[str, float]) -> Ceiling:
    factor = rates["compute" if entry.family in COMPUTE_FAMILIES else "memory"]
    return msgspec.structs.replace(
        entry,
        rate=_scaled(entry.rate, factor),
        curve=tuple(CurvePoint(work=p.work, rate=p.rate * factor) for p in entry.curve),
    )


def _faster_table(table: tuple[SizePoint, ...], factor: float) -> tuple[SizePoint, ...]:
    return tuple(
        SizePoint(num_bytes=p.num_bytes, seconds=_scaled(p.seconds, 1 / factor)) for p in table
    )


def _faster_tables(entries: Sequence[_Tabled], factor: float) -> tuple[_Tabled, ...]:
    replace = msgspec.structs.replace
    return tuple(replace(one, table=_faster_table(one.table, factor)) for one in entries)


def _faster_timings(
    machine: Machine, rates: Mapping[str, float], workload: Workload | None
) -> tuple[OperatorTiming, ...]:
    if workload is None or all(factor == 1.0 for factor in rates.values()):
        return machine.timings
    # Traces in other precisions and memory formats too: plans that run so are priced by their timings.
    ops = {op.key: op for load in (workload, *workload.variants) for op in load.ops}
    faster = []
    for entry in machine.timings:
        op = ops.get(entry.key)
        # Timings of other steps are not read by this prediction, and nothing tells what limits them.
        if op is None:
            faster.append(entry)
            continue
        # By what limits it on the machine as measured: the faster one would have other limits.
        factor = rates[op_seconds(machine, op, entry.setting).bound]
        issue = entry.issue and _scaled(entry.issue, 1 / rates["dispatch"])
        faster.append(
            msgspec.structs.replace(entry, seconds=_scaled(entry.seconds, 1 / factor), issue=issue)
        )
    return tuple(faster)


def _scaled(quantity: Quantity, factor: float) -> Quantity:
    """A number multiplied; it is no longer a measurement."""
    if factor == 1.0:
        return quantity
    return msgspec.structs.replace(quantity.times(factor), source="assumed")
