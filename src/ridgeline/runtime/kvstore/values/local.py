"""The values of one process: kinds `local` and `device`, and a worker alone."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.updaters import Updater
from ridgeline.runtime.kvstore.values.held_values import HeldValues, apply
from ridgeline.runtime.kvstore.values.merging import merged

CPU = torch.device("cpu")


class LocalShelf(HeldValues):
    """Holds values whole, and updates them where they lie.

    Args:
        on_device: Sums are taken on one of the devices that push, in turns by their load, instead of on the
            CPU.
    """

    rank, num_workers = 0, 1

    def __init__(self, *, on_device: bool) -> None:
        super().__init__()
        self._on_device = on_device
        self._loads: dict[torch.device, int] = {}

    def init(self, values: Mapping[Key, Tensor]) -> None:
        """Take copies."""
        for key, value in values.items():
            device = value.device if self._on_device else CPU
            self.values[key] = value.to(device, copy=True, memory_format=torch.contiguous_format)

    def collect(self, key: Key, values: Sequence[Tensor], *, borrows: bool = False) -> Tensor:
        """The sum of what the devices push; in memory of its own unless it borrows."""
        if self.compression is not None and values[0].is_floating_point():
            values = [
                value if value.is_sparse else self.compression.passed((key, index), value)
                for index, value in enumerate(values)
            ]
        return merged(values, self._place(key, values), borrows=borrows)

    def push(self, totals: Mapping[Key, Tensor]) -> None:
        """Work sums into the values."""
        for key, total in totals.items():
            value = self.values[key]
            if value.device != total.device:
                value = self.values[key] = value.to(total.device)
            apply(self.updater, key, total, value)

    def set_updater(self, updater: Updater) -> None:
        """From the next push on."""
        self.updater = updater

    def optimizer_states(self) -> dict[Key, dict[str, Tensor]]:
        """What the updater remembers, whole."""
        return {} if self.updater is None else self.updater.state()

    def load_optimizer_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Have the updater remember this instead.

        Raises:
            KVStoreError: there is none.
        """
        updater = self.optimizer()
        for key, state in states.items():
            updater.load_state(key, state)

    def barrier(self) -> None:
        """There is no other worker."""

    def close(self) -> None:
        """Nothing is held but memory."""

    def _place(self, key: Key, values: Sequence[Tensor]) -> torch.device:
        """Where a key is summed up: on its first push, the least loaded device of those that push."""
        if not self._on_device:
            return CPU
        devices = [value.device for value in values]
        # Where it is: to move it in each push would cost more than an even load gains.
        if self.values[key].device in devices and self.values[key].device.type != "cpu":
            return self.values[key].device
        place = min(devices, key=lambda device: self._loads.get(device, 0))
        self._loads[place] = self._loads.get(place, 0) + values[0].numel()
        return place
