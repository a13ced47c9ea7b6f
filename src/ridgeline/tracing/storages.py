"""The storages of a step: what each holds, how large it is, and between which operators it lives.

Storages are numbered as they appear and forgotten as they die (weak references), so a number is
never used for two of them even where the allocator would use the same address again.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.workload import Role

NEVER = 1 << 62
"""Death of a storage that outlives the step."""


@dataclass
class Lifetime:
    """One storage: alive right after the ops `birth` to `death - 1`; -1 is before the first op."""

    role: Role
    num_bytes: int
    birth: int
    death: int = NEVER


class Storages:
    """Numbers storages and records their lifetimes.

    Attributes:
        lifetimes: One entry for each storage, indexed by its number.
        now: Index of the op that is running; the caller counts it up.
    """

    def __init__(self) -> None:
        self.lifetimes: list[Lifetime] = []
        self.now = -1
        self._numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def number(self, tensor: Tensor, role: Role = "activation") -> int:
        """The number of a tensor's storage; a new one is entered as born now, in this role.

        -1 for tensors that have no storage of their own (sparse layouts).
        """
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return -1
        address = storage._cdata  # noqa: SLF001 - the identity of a storage that may have no data
        number = self._numbers.get(address)
        if number is None:
            number = len(self.lifetimes)
            self._numbers[address] = number
            # Storage objects of Python live as long as the memory: torch keeps one wrapper for each.
            self._references[number] = weakref.ref(storage, lambda _: self._died(address, number))
            self.lifetimes.append(
                Lifetime(role=role, num_bytes=storage.nbytes(), birth=max(self.now, -1))
            )
        return number

    def assign(self, tensor: Tensor, role: Role) -> None:
        """Say what a storage holds, for its whole life."""
        number = self.number(tensor, role)
        if number >= 0:
            self.lifetimes[number].role = role

    def role(self, number: int) -> Role:
        """What a storage holds."""
        return self.lifetimes[number].role if number >= 0 else "activation"

    def close(self) -> None:
        """Stop following: storages alive now outlive the step."""
        # Without its weak reference a storage that dies is not noticed.
        self._references.clear()

    def _died(self, address: int, number: int) -> None:
        # It was freed by the running op or right after it, so it is alive during that one.
        self.lifetimes[number].death = self.now + 1
        del self._numbers[address]
        del self._references[number]
