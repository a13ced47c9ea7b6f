"""Values in this process's memory, and what the shelves that hold some have in common."""

from collections.abc import Sequence

from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, Updater
from ridgeline.runtime.kvstore.values.shelf import Shelf, Versions


class HeldValues(Shelf):
    """Values by key, read where they lie.

    Attributes:
        values: By key; what a pull reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Key, Tensor] = {}

    def read(self, key: Key, outs: Sequence[Tensor], rows: Tensor | None) -> Versions:
        """Copy a value, or some of its rows, to each of some places."""
        value = self.values[key]
        found = value if rows is None else value[rows.to(value.device)]
        for out in outs:
            out.copy_(found)
        return {}

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
