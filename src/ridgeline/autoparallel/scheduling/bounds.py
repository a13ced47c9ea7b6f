"""What no schedule can beat: the longest chain, the work, and the links."""

from collections.abc import Iterable, Sequence

from ridgeline.autoparallel.graphs.dag import Dag, critical_path
from ridgeline.autoparallel.scheduling.makespan import NodeCost
from ridgeline.autoparallel.scheduling.placement import Transfer
from ridgeline.codec import Value


class Bounds(Value, frozen=True, kw_only=True):
    """Lower bounds of the makespan in seconds.

    Attributes:
        critical_path_s: The longest chain of nodes that wait for one another, each on its fastest device.
        work_s: What all nodes together occupy, divided by the number of devices (or threads).
        link_s: What the busiest link must carry; 0 on one device.
    """

    critical_path_s: float
    work_s: float
    link_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """The largest of the bounds."""
        return max(self.critical_path_s, self.work_s, self.link_s)


def find_bounds(
    dag: Dag, costs: Sequence[NodeCost], *, num_devices: int = 1, transfers: Iterable[Transfer] = ()
) -> Bounds:
    """The bounds of any schedule of `dag`.

    A node costs what it does alone on its fastest device; one that fills half of that counts for half of its
    time as work. `transfers` are copies of a given placement, and bound what that can reach.
    """
    links: dict[tuple[int, int], float] = {}
    for t in transfers:
        pair = (t.source, t.target)
        # Both directions of a link carry at once, so each is a bound of its own.
        links[pair] = links.get(pair, 0.0) + (t.end - t.start)
    return Bounds(
        critical_path_s=critical_path(dag, [cost.seconds for cost in costs]),
        work_s=sum(cost.seconds * cost.fill for cost in costs) / num_devices,
        link_s=max(links.values(), default=0.0),
    )
