"""Max-min fair sharing: what each of several flows gets of the links that they share, and when it is through.

Links that treat all who send alike give each the same, and what one cannot use, because another link of its
way holds it back or it has no more to send, is shared by the others. Switches with fair queues do so, and
congestion control approaches it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ridgeline.errors import LawError
from ridgeline.given import checked
from ridgeline.laws.arguments import check

_AT_ONCE = 1.0 + 1e-12
"""Flows whose ends are apart by no more than rounding end at once."""


class Flow(NamedTuple):
    """Bytes on their way over some links.

    Attributes:
        links: The links that it passes, each once.
        num_bytes: What it sends; infinite for traffic that does not end.
        start_s: When it begins.
        most_bytes_per_s: What it sends at most, whatever links would carry.
    """

    links: tuple[str, ...]
    num_bytes: float = math.inf
    start_s: float = 0.0
    most_bytes_per_s: float = math.inf


@checked(LawError)
def fair_rates(flows: Sequence[Flow], capacities: Mapping[str, float]) -> tuple[float, ...]:
    """Bytes per second of each flow, while all of them send.

    No flow can have more without another having less that has no more than it already.

    Args:
        flows: Their links and what they send at most are used.
        capacities: Bytes per second of each link, in the direction of the flows.

    Raises:
        LawError: a number is out of range, a link is unknown or twice on one way, or nothing limits a flow.

    Cost: Rounds of all flows, as many as there are different rates.

    Source: progressive filling: Bertsekas, Gallager, "Data Networks", 2nd edition, 1992, section 6.5.2.

    Example:
        >>> fair_rates([Flow(("a",)), Flow(("a", "b")), Flow(("b",))], {"a": 10.0, "b": 4.0})
        (8.0, 2.0, 2.0)
    """
    for flow in flows:
        _check(flow, capacities)
    rates = [0.0] * len(flows)
    left = {link: float(capacities[link]) for flow in flows for link in flow.links}
    growing = list(range(len(flows)))
    level = 0.0
    while growing:
        counts: dict[str, int] = {}
        for index in growing:
            for link in flows[index].links:
                counts[link] = counts.get(link, 0) + 1
        # All rise together until a link is full, or one sends what it wants to.
        full = {link: level + left[link] / count for link, count in counts.items()}
        most = (flows[index].most_bytes_per_s for index in growing)
        # Rounding may put a full link a little below the level that was reached; levels never fall.
        reached = max(level, min((*full.values(), *most)))
        for link, count in counts.items():
            left[link] = max(0.0, left[link] - (reached - level) * count)
        level = reached
        for index in growing:
            rates[index] = level
        growing = [index for index in growing if _can_grow(flows[index], full, level)]
    return tuple(rates)


@checked(LawError)
def fair_finish_seconds(
    flows: Sequence[Flow], capacities: Mapping[str, float]
) -> tuple[float, ...]:
    """When each flow has sent all its bytes, where rates are fair at every moment.

    Whenever a flow begins or ends, what it takes or leaves is shared again.

    Args:
        flows: Each from its start on.
        capacities: Bytes per second of each link.

    Returns:
        Seconds from 0 on; infinite for a flow that does not end.

    Raises:
        LawError: as `fair_rates`.

    Cost: As many calls of `fair_rates` as there are different starts and ends.

    Example:
        >>> fair_finish_seconds([Flow(("a",), 4.0), Flow(("a",), 4.0, start_s=1.0)], {"a": 2.0})
        (3.0, 4.0)
    """
    for flow in flows:
        _check(flow, capacities)
    # What sends nothing ends as it begins, and never takes a share.
    ends = [math.inf if flow.num_bytes else flow.start_s for flow in flows]
    left = [flow.num_bytes for flow in flows]
    # Latest first, so that `pop` takes the next one.
    waiting = sorted({flow.start_s for flow in flows}, reverse=True)
    active: list[int] = []
    now_s = 0.0
    while active or waiting:
        rates = fair_rates([flows[index] for index in active], capacities)
        lasting_s = [left[index] / rate for index, rate in zip(active, rates, strict=True)]
        first_s = min(lasting_s, default=math.inf)
        begun: list[int] = []
        if waiting and waiting[-1] - now_s <= first_s:
            start_s = waiting.pop()
            passed_s, now_s = start_s - now_s, start_s
            begun = [i for i, f in enumerate(flows) if f.start_s == start_s and f.num_bytes]
        # Nobody begins any more, and what still sends does not end.
        elif math.isinf(first_s):
            break
        else:
            passed_s, now_s = first_s, now_s + first_s
        going: list[int] = []
        for index, rate, needed_s in zip(active, rates, lasting_s, strict=True):
            if needed_s <= passed_s * _AT_ONCE:
                ends[index] = now_s
            else:
                left[index] -= rate * passed_s
                going.append(index)
        active = [*going, *begun]
    return tuple(ends)


def _can_grow(flow: Flow, full: Mapping[str, float], level: float) -> bool:
    """Whether neither a link nor its own limit holds a flow back at this level."""
    return flow.most_bytes_per_s > level and all(full[link] > level for link in flow.links)


def _check(flow: Flow, capacities: Mapping[str, float]) -> None:
    """Refuse flows that are held back by nothing, and those over links that are none.

    Raises:
        LawError: names the link, or the number.
    """
    check("num_bytes", flow.num_bytes, least=0.0, is_finite=False)
    check("start_s", flow.start_s, least=0.0)
    check("most_bytes_per_s", flow.most_bytes_per_s, above=0.0, is_finite=False)
    if isinstance(flow.links, str) or not isinstance(flow.links, Sequence):
        raise LawError(
            f"wanted the links of a flow as a tuple of names, got {flow.links!r}; write ('a',) for one"
        )
    for link in flow.links:
        if link not in capacities:
            known = ", ".join(sorted(capacities)) or "none"
            raise LawError(f"wanted links out of {known}, got {link!r}; give its capacity")
        check(f"capacity of {link}", capacities[link], above=0.0)
    if len(set(flow.links)) < len(flow.links):
        raise LawError(
            f"wanted each link once on the way of a flow, got {', '.join(flow.links)}; name it once"
        )
    if not flow.links and math.isinf(flow.most_bytes_per_s):
        raise LawError(
            "wanted a flow over at least one link, or with a finite most_bytes_per_s, got neither; name "
            "its links"
        )
