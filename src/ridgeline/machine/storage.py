"""`Storage`: what reading and writing files of one directory costs, by their size and how many at once."""

from typing import Annotated, Literal

from msgspec import Meta

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.machine.quantity import Quantity

Operation = Literal["write", "synced append", "read", "read at random"]
"""`write` and `read` go through a file in order. `synced append`: at its end, each with an fsync."""

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are memory, whether reads of them are direct or not."""


class Access(Value, frozen=True, kw_only=True):
    """One way to use a file: `depth` threads, each of which moves a block, waits for it, and continues.

    `seconds` are those of one block, from the call to its end. `rate` is what all threads together move, one
    sample for each tenth of the blocks.
    """

    operation: Operation
    block_bytes: Annotated[int, Meta(ge=1)]
    depth: Annotated[int, Meta(ge=1)]
    seconds: Quantity
    rate: Quantity

    @property
    def name(self) -> str:
        """What is done, in a few words."""
        return described(self.operation, self.block_bytes, self.depth)

    @property
    def blocks_per_s(self) -> float:
        """Blocks per second of all threads together."""
        return self.rate.value / self.block_bytes


def described(operation: Operation, block_bytes: int, depth: int) -> str:
    """A way of access in a few words, e.g. `read of 4.00 KiB at random, 16 at once`."""
    size = units.num_bytes(block_bytes)
    how = {
        "write": f"write of {size} in order",
        "synced append": f"append of {size}, each with fsync",
        "read": f"read of {size} in order",
        "read at random": f"read of {size} at random",
    }[operation]
    return f"{how}, {depth} at once" if depth > 1 else how


class Storage(Value, frozen=True, kw_only=True):
    """What a file of `file_bytes` in `folder` took; the figures are those of its file system and drive.

    `is_direct`: past the system's cache of files. `is_compiled`: reads were issued by a loop in C, and not in
    Python. `mount` is where the file system begins, `kind` its type.
    """

    folder: str
    mount: str
    kind: str
    is_direct: bool = False
    is_compiled: bool = False
    file_bytes: Annotated[int, Meta(ge=0)] = 0
    accesses: tuple[Access, ...] = ()

    @property
    def place(self) -> str:
        """Where that was, and how much of it, e.g. `a file of 1.00 GiB in ~/runs, on ext4 at /`."""
        size = units.num_bytes(self.file_bytes)
        return f"a file of {size} in {self.folder}, on {self.kind} at {self.mount}"

    @property
    def meaning(self) -> str:
        """What the figures are of, in one sentence."""
        if self.is_compiled:
            return self._way
        return f"{self._way}; issued by Python, as there is no C compiler: many at once wait for each other"

    @property
    def _way(self) -> str:
        # First: such file systems may take direct I/O, too, and their figures are of no drive all the same.
        if self.kind in IN_MEMORY:
            return f"{self.kind} keeps files in memory: these are figures of memory, not of a drive"
        if self.is_direct:
            return "direct: past the system's cache of files"
        return (
            f"{self.kind} allows no direct I/O: reads come from the system's cache of files, so their "
            "figures are those of memory; writes go through it, and wait for the drive every 16 MiB"
        )
