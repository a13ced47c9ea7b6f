"""What a store asks of where its values are."""

import abc
from collections.abc import Mapping, Sequence

from torch import Tensor

from ridgeline.history import Outage
from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.compression import KeyedCompression
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, Updater

Versions = Mapping[int, int]
"""Of a value: how many pushes of each worker it holds. Empty where all see the same ones."""


class Shelf(abc.ABC):
    """Where the values of a store are, and how sums are worked into them.

    Attributes:
        rank: This worker's number.
        num_workers: How many began.
        address: Where other processes join; empty where none can.
        is_collective: Whether all workers must make the same pushes in the same order.
        updater: None replaces a value by the sum that is pushed.
        compression: Of what is pushed.
    """

    rank: int
    num_workers: int
    address = ""
    is_collective = False

    def __init__(self) -> None:
        self.updater: Updater | None = None
        self.compression: KeyedCompression | None = None

    @abc.abstractmethod
    def init(self, values: Mapping[Key, Tensor]) -> None:
        """Take the first values."""

    @abc.abstractmethod
    def collect(self, key: Key, values: Sequence[Tensor], *, borrows: bool = False) -> Tensor:
        """The sum of this worker's, in the caller's thread.

        In memory of its own, unless it `borrows`: then what is pushed is not changed before it is worked in.
        """

    @abc.abstractmethod
    def push(self, totals: Mapping[Key, Tensor]) -> None:
        """Work the sums of all workers into the values; in the lane."""

    @abc.abstractmethod
    def set_updater(self, updater: Updater) -> None:
        """From the next push on; nothing is under way."""

    @abc.abstractmethod
    def change_settings(self, updater: OptimizerUpdater) -> None:
        """Have the optimizer that is set continue with the settings of this one; nothing is under way."""

    @abc.abstractmethod
    def read(self, key: Key, outs: Sequence[Tensor], rows: Tensor | None) -> Versions:
        """Fill `outs` with a value, or with some of its rows; in the lane."""

    def read_alike(self, places: Mapping[Key, Sequence[Tensor]]) -> Versions:
        """Fill places with values that all hold the same pushes; in the lane."""
        # One after the other: only where values are in servers do they change meanwhile.
        for key, outs in places.items():
            self.read(key, outs, None)
        return {}

    def push_and_read(self, key: Key, total: Tensor, outs: Sequence[Tensor]) -> Versions:
        """Work a sum in and fill `outs` with what came of it, which may be where the sum is; in the lane."""
        self.push({key: total})
        return self.read(key, outs, None)

    @abc.abstractmethod
    def optimizer_states(self) -> dict[Key, dict[str, Tensor]]:
        """What is remembered of whole values; on the first worker."""

    @abc.abstractmethod
    def load_optimizer_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Remember this instead."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return once all workers have called this."""

    def present(self) -> tuple[int, ...]:
        """The workers who are there."""
        return tuple(range(self.num_workers))

    def outages(self) -> tuple[Outage, ...]:
        """When servers were not heard of; nothing where there are none."""
        return ()

    @abc.abstractmethod
    def close(self) -> None:
        """Release what is held."""
