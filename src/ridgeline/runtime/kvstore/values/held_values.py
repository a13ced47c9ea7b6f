"""Values in this process's memory, and what the shelves that hold some have in common."""

import abc
from collections.abc import Mapping, Sequence

from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.history import Outage
from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.compression import KeyedCompression
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, Updater
from ridgeline.runtime.kvstore.values.shelf import Versions


class HeldValues(abc.ABC):
    """Values by key, read where they lie.

    Attributes:
        address: None joins.
        values: By key; what a pull reads.
        updater: None replaces a value by the sum that is pushed.
        compression: Of what is pushed.
    """

    num_workers: int
    address = ""

    def __init__(self) -> None:
        self.values: dict[Key, Tensor] = {}
        self.updater: Updater | None = None
        self.compression: KeyedCompression | None = None

    def present(self) -> tuple[int, ...]:
        """All who began."""
        return tuple(range(self.num_workers))

    def outages(self) -> tuple[Outage, ...]:
        """There are no servers."""
        return ()

    @abc.abstractmethod
    def push(self, totals: Mapping[Key, Tensor]) -> None:
        """Work sums into the values."""

    def read(self, key: Key, outs: Sequence[Tensor], rows: Tensor | None) -> Versions:
        """Copy a value, or some of its rows, to each of some places."""
        value = self.values[key]
        found = value if rows is None else value[rows.to(value.device)]
        for out in outs:
            out.copy_(found)
        return {}

    def read_alike(self, places: Mapping[Key, Sequence[Tensor]]) -> Versions:
        """One after the other; values do not change meanwhile."""
        for key, outs in places.items():
            self.read(key, outs, None)
        return {}

    def push_and_read(self, key: Key, total: Tensor, outs: Sequence[Tensor]) -> Versions:
        """One after the other."""
        self.push({key: total})
        return self.read(key, outs, None)

    def change_settings(self, updater: OptimizerUpdater) -> None:
        """The optimizer continues with the settings of another one of its name."""
        assert isinstance(self.updater, OptimizerUpdater), "its name was compared"
        self.updater.with_settings_of(updater)

    def optimizer(self) -> Updater:
        """The updater that states are loaded into.

        Raises:
            KVStoreError: there is none.
        """
        if self.updater is None:
            raise KVStoreError(
                "wanted an optimizer to load states into, got none; call set_optimizer first"
            )
        return self.updater


def apply(updater: Updater | None, key: Key, total: Tensor, value: Tensor) -> None:
    """Work a sum into a value: by the updater, or in its place."""
    if updater is not None:
        updater(key, total, value)
    else:
        value.copy_(total.to_dense() if total.is_sparse else total)
