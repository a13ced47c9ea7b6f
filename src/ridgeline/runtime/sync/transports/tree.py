"""The tree: sums climb a binomial tree to worker 0, and the mean comes down it again.

A worker waits for 2 ceil(log2 n) messages at most instead of the 2 (n-1) of a ring, and each of them is the
whole payload: for many workers and buckets so small that only the waiting counts.

Worker r adds what worker r + 2^k has gathered, for growing k, so the order of additions is that of the tree,
the same in every run; all workers get the sum of worker 0.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005 (binomial reduce and broadcast).
"""

from collections.abc import Mapping

from torch import Tensor

from ridgeline.runtime.sync.transports.messages import Message, Messages
from ridgeline.runtime.sync.transports.summing import SummingTransport
from ridgeline.synchronisation import OptionValue
from ridgeline.workers.world import World


class Tree(SummingTransport):
    """Reduce to worker 0 and broadcast from it, over point-to-point messages along a binomial tree."""

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        self._messages = Messages(self.group, on_device=self.on_device)
        self._parent, self._children = place_in_tree(self.rank, self.size)

    def add_up(self, values: Tensor) -> None:
        """Up to the root and down again."""
        exchange, parent = self._messages.exchange, self._parent
        beside = self.scratch(values)
        # Small subtrees first: they are ready first.
        for child in self._children:
            exchange([Message(beside, child)], [])
            values.add_(beside)
        if parent is not None:
            self._messages.ask(Message(values, parent))
        else:
            self.scaling.take_back(values)
        # The largest subtree first: it has the longest way to go.
        exchange([], [Message(values, child) for child in reversed(self._children)])
        self._messages.finish()


def place_in_tree(rank: int, size: int) -> tuple[int | None, tuple[int, ...]]:
    """The parent of a worker in a binomial tree, None for the root; its children, small subtrees first."""
    # The lowest bit that is set: a worker's subtree has as many members.
    lowest = rank & -rank if rank else 1 << size.bit_length()
    steps = (1 << k for k in range(lowest.bit_length() - 1))
    children = tuple(rank + step for step in steps if rank + step < size)
    return (rank - lowest if rank else None), children
