"""Several rings at once: each reduces a part of the payload, in proportion to what its links carry.

The rings run together, move by move, so links that one of them leaves idle work for another. Which rings, a
plan says (`orders`; see `synchronisation.rings` for how they are found); by default half of the payload goes
around in each direction, which links of their own between neighbours carry at once.
"""

from collections.abc import Mapping

from torch import Tensor

from ridgeline.runtime.sync.transports.messages import Messages
from ridgeline.runtime.sync.transports.ring import (
    ALIGNED,
    Cut,
    Lap,
    neighbours,
    num_pieces,
    ring_moves,
    run_laps,
    share_elements,
)
from ridgeline.runtime.sync.transports.summing import SummingTransport
from ridgeline.synchronisation import OptionValue
from ridgeline.synchronisation.rings import read, split
from ridgeline.workers.world import World


class Rings(SummingTransport):
    """Reduce-scatter and all-gather over several rings at once.

    Raises:
        PlanError: the plan's orders are not of all workers.
    """

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        self._rings = read(str(self.options["orders"]), self.size)
        self._messages = Messages(self.group, on_device=self.on_device)

    def scratch_elements(self, num_elements: int) -> int:
        """A share of every part."""
        return sum(
            share_elements(end - begin, self.size, self.options)
            for begin, end in self._parts(num_elements)
        )

    def add_up(self, values: Tensor) -> None:
        """All rings move by move, once around to add and once around to distribute."""
        parts = self._parts(values.numel())
        # All rings have as many pieces, since they run move by move.
        largest = max(parts, key=lambda part: part[1] - part[0])
        pieces = num_pieces(values[slice(*largest)], self.size, self.options)
        scratch, used = self.scratch(values), 0
        laps: list[Lap] = []
        for (begin, end), ring in zip(parts, self._rings, strict=True):
            place = ring.order.index(self.rank)
            cut = Cut.of(end - begin, self.size, pieces)
            laps.append(
                Lap(
                    values[begin:end],
                    scratch[used : used + cut.share],
                    ring_moves(cut, place, self.size),
                    *neighbours(ring.order, place),
                )
            )
            used += cut.share
        run_laps(laps, pieces, self.scaling, self._messages)

    def _parts(self, num_elements: int) -> list[tuple[int, int]]:
        return split(num_elements, [ring.bytes_per_s for ring in self._rings], ALIGNED)
