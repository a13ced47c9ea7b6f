"""`GpuLevels`: what a GPU's memory costs by how much of it is used, and what fills its multiprocessors."""

from typing import Literal

from ridgeline.codec import Value
from ridgeline.machine.quantity import Sampled

FULL = 0.95
"""Share of the best rate at which more blocks are said to bring nothing: spreads are a few percent."""
NEAR = 0.9
"""Share of the bandwidth of memory from which an operator is said to reach it."""


class GpuStair(Value, frozen=True, kw_only=True):
    """What so many bytes of a GPU's memory cost where they are used again and again."""

    num_bytes: int
    access: Sampled
    """Seconds of a load of 8 bytes, somewhere in them, that waits for the one before it."""
    read: Sampled | None = None
    """B/s at which all multiprocessors read them, past their own caches; None where the set is too small to
    keep all of them busy."""


class GpuStairs(Value, frozen=True, kw_only=True):
    """The levels of a GPU's memory; sizes ascend. `cache_bytes` has the cache of the whole GPU (L2)."""

    cache_bytes: int
    stairs: tuple[GpuStair, ...]

    @property
    def cached(self) -> GpuStair | None:
        """The stair that stands for the cache: the largest that fills half of it at most, and was read."""
        # Half at most: what fills a cache entirely is partly read from behind it.
        # What was too small to be read keeps few multiprocessors busy, and says nothing of the cache's rate.
        fitting = [one for one in self.stairs if one.read and 2 * one.num_bytes <= self.cache_bytes]
        return fitting[-1] if fitting else None


class BlocksPoint(Value, frozen=True, kw_only=True):
    """What all blocks of a kernel reach together."""

    blocks: int
    rate: Sampled


class BlocksCurve(Value, frozen=True, kw_only=True):
    """Rates of one kernel by the number of its blocks, which ascend: multiply-adds, or reading memory."""

    work: Literal["multiply-add", "read"]
    threads_per_block: int
    points: tuple[BlocksPoint, ...]

    @property
    def best(self) -> BlocksPoint:
        """The point of the highest rate."""
        return max(self.points, key=lambda point: point.rate.value)

    @property
    def knee(self) -> BlocksPoint:
        """The fewest blocks that reach 95 % of the best rate: from there on more bring nothing."""
        target = FULL * self.best.rate.value
        return next(point for point in self.points if point.rate.value >= target)


class GpuBlocks(Value, frozen=True, kw_only=True):
    """What fills a GPU's multiprocessors."""

    multiprocessors: int
    curves: tuple[BlocksCurve, ...]
    shared: Sampled
    """B/s at which all multiprocessors read memory that their blocks share."""


class SizedRate(Value, frozen=True, kw_only=True):
    """B/s of an operator that reads and writes so many bytes, counted twice in the rate."""

    num_bytes: int
    rate: Sampled


class GpuSizes(Value, frozen=True, kw_only=True):
    """What an operator of torch reaches by the size of its tensor; sizes ascend, the last far beyond L2."""

    call: str
    points: tuple[SizedRate, ...]

    @property
    def knee(self) -> SizedRate:
        """The smallest tensor that reaches 90 % of what the largest does: smaller ones wait for launches."""
        target = NEAR * self.points[-1].rate.value
        # There always is one: the largest reaches what it reaches itself.
        return next(point for point in self.points if point.rate.value >= target)


class GpuLevels(Value, frozen=True, kw_only=True):
    """What a GPU, the first of its host, gives by size and by blocks; None: not measured so far."""

    stairs: GpuStairs | None = None
    blocks: GpuBlocks | None = None
    sizes: GpuSizes | None = None
