"""Inside each host first: what crosses the network is one share of a bucket for each worker.

Workers of a host reduce and scatter, so that each has the host's sum of its share; those with the same share
sum it over the hosts; and the workers of a host gather the shares. With h hosts, the network of one carries
2 (h-1)/h of the payload, in whatever order workers are numbered, and a message waits for h hosts at most.

All three are rings of messages within the one group. Groups of a host could only be made by asking all
workers of the job, and torch hangs where these made unlike numbers of groups before.

Source: Jia et al., "Highly scalable deep learning training system with mixed-precision", 2018 (hierarchical
all-reduce).
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ridgeline.errors import PlanError
from ridgeline.runtime.sync.transports.hosts import hosts_of
from ridgeline.runtime.sync.transports.messages import Messages
from ridgeline.runtime.sync.transports.ring import (
    ALIGNED,
    MOST_PIECES,
    Cut,
    Lap,
    adding_moves,
    gathering_moves,
    neighbours,
    num_pieces,
    ring_moves,
    run_laps,
    share_elements,
)
from ridgeline.runtime.sync.transports.scaling import UNSCALED, Scaling
from ridgeline.runtime.sync.transports.summing import SummingTransport
from ridgeline.synchronisation import OptionValue
from ridgeline.synchronisation.placed import LOCAL, hosts_objection
from ridgeline.workers.world import World


class Hierarchical(SummingTransport):
    """Reduce-scatter inside the host, all-reduce of shares between hosts, all-gather inside.

    Options: `local`: how many consecutive workers share a host; 0 finds out which do.

    Raises:
        PlanError: there is one host, one worker on each, or not as many on each.

    Cost: Finding out takes one exchange between all workers, which waits for the device.
    """

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        self._messages = Messages(self.group, on_device=self.on_device)
        hosts = hosts_of(world, int(self.options[LOCAL.name]))
        check_hosts(hosts)
        self._inside = next(host for host in hosts if self.rank in host)
        self._place = self._inside.index(self.rank)
        # Workers in the same place of their hosts end up with the same share, and form one ring across.
        self._between = [host[self._place] for host in hosts]

    def scratch_elements(self, num_elements: int) -> int:
        """One share of a host; shares of that between the hosts, of two at least, are smaller."""
        room = max(MOST_PIECES, int(self.options["pieces"])) * ALIGNED
        # Both cuts are rounded up, the second one of what the first has rounded up already.
        return share_elements(num_elements, len(self._inside), self.options) + room

    def add_up(self, values: Tensor) -> None:
        """Half a ring inside, a ring between the hosts, and the other half inside."""
        size, place = len(self._inside), self._place
        pieces = num_pieces(values, size, self.options)
        cut = Cut.of(values.numel(), size, pieces)
        # For all three rings: `scratch(mine)` is cut for as many shares as a host has workers, and between
        # fewer hosts than that a share is larger.
        scratch = self.scratch(values)
        # Sums are scaled once, between the hosts; both halves of the ring inside leave them as they are.
        moves = adding_moves(cut, place, size)
        self._run(Lap(values, scratch, moves, *neighbours(self._inside, place)), pieces, UNSCALED)
        # After the adding half, the share of the next place is the one that is complete here.
        begin, _ = cut.span((place + 1) % size, 0)
        _, end = cut.span((place + 1) % size, pieces - 1)
        mine = values[begin:end]
        num_hosts = len(self._between)
        pieces_between = num_pieces(mine, num_hosts, self.options)
        cut_between = Cut.of(mine.numel(), num_hosts, pieces_between)
        host = self._between.index(self.rank)
        moves = ring_moves(cut_between, host, num_hosts)
        lap = Lap(mine, scratch, moves, *neighbours(self._between, host))
        self._run(lap, pieces_between, self.scaling)
        moves = gathering_moves(cut, place, size)
        self._run(Lap(values, scratch, moves, *neighbours(self._inside, place)), pieces, UNSCALED)

    def _run(self, lap: Lap, pieces: int, scaling: Scaling) -> None:
        run_laps((lap,), pieces, scaling, self._messages)


def check_hosts(hosts: Sequence[Sequence[int]]) -> None:
    """See that there is something to gain inside the hosts and between them.

    Raises:
        PlanError: there is not.
    """
    if objection := hosts_objection([len(host) for host in hosts]):
        raise PlanError(objection)
