"""Operators that a compiler makes one kernel of."""

from typing import NamedTuple


class Run(NamedTuple):
    """Operators that become one kernel: their indices in order, and the bytes across its boundary."""

    ops: tuple[int, ...]
    bytes_read: int
    bytes_written: int

    @property
    def num_bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written
