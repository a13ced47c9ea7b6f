"""Rings that use the links between workers fully: which way around, and how much of a payload on each.

A ring all-reduce loads one direction of the links along one way around all workers. Where pairs of workers
have links of their own, others idle meanwhile; several rings that share no bandwidth carry parts of a payload
at once. They are searched for on a graph of bandwidths, measured or read from a driver.

Source: the idea is that of NCCL's channels (src/graph/search.cc). The search is plain backtracking, widest
rings first, with a bound on what the links of any worker carry.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ridgeline.errors import PlanError
from ridgeline.machine import Machine

MOST_RINGS = 16
EFFORT = 20_000
"""Steps of the search, after which the best that was found is taken: some tenths of a second at most."""
# What is taken from a link and left of it are floats: differences below this are rounding.
_RELATIVE = 1e-9


class RingOrder(NamedTuple):
    """One way around all workers, in one direction.

    Attributes:
        order: Positions of the workers, each once, the smallest first; the last sends to the first.
        bytes_per_s: What it carries over each of its links.
    """

    order: tuple[int, ...]
    bytes_per_s: float


class PortLimit(NamedTuple):
    """What all links of some workers with the others carry together, in each direction.

    The port of one worker to a switch, the uplink of those below one bridge, or the network of a host.
    """

    workers: frozenset[int]
    bytes_per_s: float


class _Graph:
    """What is left of the links and of the limits."""

    def __init__(self, links: Sequence[Sequence[float]], limits: Sequence[PortLimit]) -> None:
        self.size = len(links)
        self.links = [[float(rate) for rate in row] for row in links]
        self.limits = [(limit.workers, float(limit.bytes_per_s)) for limit in limits]

    def bound(self) -> float:
        """What all rings carry together at most: each leaves and enters every worker and every group."""
        leaving = [sum(row) - row[i] for i, row in enumerate(self.links)]
        entering = [sum(row[i] for row in self.links) - self.links[i][i] for i in range(self.size)]
        # A ring never leaves a group that holds all workers, so its limit bounds nothing.
        inner = [rate for group, rate in self.limits if 0 < len(group) < self.size]
        return min([*leaving, *entering, *inner])

    def rate(self, order: Sequence[int]) -> float:
        """What one more ring in this order could carry."""
        narrowest = min(self.links[a][b] for a, b in _hops(order))
        # A ring that leaves a group several times shares its limit among these hops.
        shared = [
            rate / crossings
            for group, rate in self.limits
            if (crossings := sum(a in group and b not in group for a, b in _hops(order)))
        ]
        return min([narrowest, *shared])

    def take(self, order: Sequence[int], rate: float) -> None:
        """Leave what a ring does not use."""
        for a, b in _hops(order):
            self.links[a][b] -= rate
        self.limits = [
            (group, left - rate * sum(a in group and b not in group for a, b in _hops(order)))
            for group, left in self.limits
        ]

    def copied(self) -> "_Graph":
        """To be put back later, exactly: what is taken and given back differs by rounding."""
        return _Graph(self.links, [PortLimit(*limit) for limit in self.limits])


def find_rings(
    links: Sequence[Sequence[float]], limits: Sequence[PortLimit] = (), *, effort: int = EFFORT
) -> tuple[RingOrder, ...]:
    """Rings over all workers that share no bandwidth and carry the most together, as far as is found.

    Args:
        links: Bytes per second from worker (row) to worker (column), 0 where no link is; 2 workers or more.
        limits: What several links share.
        effort: Steps of the search.

    Returns:
        The widest first; none where no way leads around all workers.

    Raises:
        PlanError: the links are no square of numbers >= 0.
    """
    _check(links)
    # Both directions of links are best used around and back; where they are not alike, each for itself.
    searches = [
        _Search(_Graph(links, limits), effort, is_paired=paired) for paired in (True, False)
    ]
    best: list[RingOrder] = []
    for search in searches:
        # Each search has all of the effort; the second is spared where the first found all there is.
        if _total(best) < search.bound:
            search.extend([])
            best = max(best, search.best, key=_total)
    return tuple(sorted(best, key=lambda ring: -ring.bytes_per_s))


class _Search:
    """Backtracking over rings, the widest first; stops at the bound, or when its steps are used up.

    `best` are the rings that carry the most together so far; none exceed the bound, but for rounding.
    """

    def __init__(self, graph: _Graph, effort: int, *, is_paired: bool) -> None:
        self.best: list[RingOrder] = []
        self.bound = graph.bound() * (1.0 - _RELATIVE)
        self._graph = graph
        self._left = effort
        self._is_paired = is_paired

    def extend(self, chosen: list[RingOrder]) -> None:
        """Try what can be added to some rings."""
        total, graph = _total(chosen), self._graph
        # By more than rounding: of equal totals the first that was found stays, with the widest rings.
        if total > _total(self.best) * (1.0 + _RELATIVE):
            self.best = list(chosen)
        # Nothing that follows can add more than the links that are left carry.
        room = total + graph.bound() - _total(self.best)
        if len(chosen) >= MOST_RINGS or room <= self.bound * _RELATIVE:
            return
        for order in self._orders():
            before = graph.copied()
            taken: list[RingOrder] = []
            for way in (order, _back(order))[: 1 + self._is_paired]:
                rate = graph.rate(way)
                if rate > self.bound * _RELATIVE:
                    graph.take(way, rate)
                    taken.append(RingOrder(tuple(way), rate))
            if taken:
                self.extend([*chosen, *taken])
            graph.links, graph.limits = before.links, before.limits
            if self._left <= 0 or _total(self.best) >= self.bound:
                return

    def _orders(self) -> Iterator[list[int]]:
        """Ways around, over wide links first."""
        rates = {rate for row in self._graph.links for rate in row}
        for least in sorted((rate for rate in rates if rate > 0.0), reverse=True):
            yield from self._around([0], least)

    def _around(self, path: list[int], least: float) -> Iterator[list[int]]:
        """Every way from a path on around all workers over links that are no narrower than `least`."""
        self._left -= 1
        row = self._graph.links[path[-1]]
        if self._left <= 0:
            return
        if len(path) == self._graph.size:
            if row[path[0]] >= least:
                yield list(path)
            return
        free = [b for b in range(self._graph.size) if b not in path and row[b] >= least]
        # The widest link first; then who could get stuck: few ways lead on from there.
        free.sort(key=lambda b: (-row[b], self._ways_on(b, path, least), b))
        for following in free:
            path.append(following)
            yield from self._around(path, least)
            path.pop()

    def _ways_on(self, worker: int, path: Sequence[int], least: float) -> int:
        return sum(
            rate >= least and other not in path
            for other, rate in enumerate(self._graph.links[worker])
            if other != worker
        )


def ports(size: int, bytes_per_s: float) -> tuple[PortLimit, ...]:
    """Workers at one switch, each by one port, whatever pairs talk."""
    return tuple(PortLimit(frozenset((worker,)), bytes_per_s) for worker in range(size))


def split(num_elements: int, weights: Sequence[float], aligned: int = 1) -> list[tuple[int, int]]:
    """[begin, end) of the part of a payload for each weight, in proportion, at multiples of `aligned`."""
    # Ends come from running sums, or the rounding of each part would add up over all.
    total, sum_ = sum(weights), 0.0
    ends: list[int] = []
    for weight in weights:
        sum_ += weight
        ends.append(min(num_elements, round(num_elements * sum_ / total / aligned) * aligned))
    # Alignment may round the last end down; what it leaves out belongs to the last part.
    ends[-1] = num_elements
    return list(zip([0, *ends[:-1]], ends, strict=True))


def link_rates(machine: Machine, workers: int) -> list[list[float]]:
    """Bytes per second from GPU to GPU by the largest measured copies; 0 where nothing was measured."""
    rates = [[0.0] * workers for _ in range(workers)]
    for link in machine.links:
        is_between = link.direction == "device_to_device" and link.source != link.target
        # A profile may know more GPUs than the job has workers.
        if is_between and link.table and max(link.source, link.target) < workers:
            last = link.table[-1]
            rates[link.source][link.target] = last.num_bytes / last.seconds.value
    return rates


def written(rings: Sequence[RingOrder]) -> str:
    """Rings as a plan's option says them: `0,1,2:1;0,2,1:1`, each an order and its part of the payload."""
    return ";".join(f"{','.join(map(str, r.order))}:{r.bytes_per_s:g}" for r in rings)


def read(text: str, size: int) -> tuple[RingOrder, ...]:
    """Rings over so many workers from the words of an option; empty: once around, and once back.

    Raises:
        PlanError: an order does not hold every worker once, or its part is no number above 0.
    """
    forwards = tuple(range(size))
    if not text:
        ways = (forwards, tuple(_back(forwards)))
        # Of two workers the way back is the way there.
        return tuple(RingOrder(order, 1.0) for order in dict.fromkeys(ways))
    found = []
    for part in text.split(";"):
        order, _, weight = part.partition(":")
        try:
            ring = RingOrder(tuple(int(place) for place in order.split(",")), float(weight or 1.0))
        except ValueError:
            # Made invalid on purpose: the check below then refuses it with the same words.
            ring = RingOrder((), 0.0)
        # `float` reads `nan` and `inf` as well, by which no payload can be divided.
        if tuple(sorted(ring.order)) != forwards or not 0.0 < ring.bytes_per_s < float("inf"):
            example = written(read("", size))
            raise PlanError(
                f"wanted sync.options['orders'] as orders of all {size} workers and their parts, got "
                f"{part!r} in the plan; for example {example!r}"
            )
        found.append(ring)
    return tuple(found)


def _check(links: Sequence[Sequence[float]]) -> None:
    size = len(links)
    is_square = size > 1 and all(len(row) == size for row in links)
    if not is_square or not all(0.0 <= rate < float("inf") for row in links for rate in row):
        raise PlanError(
            "wanted links as bytes per second >= 0 from each of several workers to each, got "
            f"{[list(row) for row in links]!r}; give one row and one column a worker"
        )


def _hops(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(order, (*order[1:], order[0]), strict=True)


def _back(order: Sequence[int]) -> list[int]:
    """The same ring in the other direction."""
    return [order[0], *reversed(order[1:])]


def _total(rings: Sequence[RingOrder]) -> float:
    return sum(ring.bytes_per_s for ring in rings)
