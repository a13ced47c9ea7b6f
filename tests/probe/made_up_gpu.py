"""A GPU made of arithmetic: its levels, multiprocessors and launches take what round numbers say."""

MIB = 1 << 20


class MadeUpGpu:
    """Ten multiprocessors, a cache of 1 MiB and room for 16 MiB.

    A load takes 100 ns within the cache and 400 ns beyond; each multiprocessor multiplies and adds 64 times a
    nanosecond once it has 512 threads; all read 10 TB/s of the cache and 2 TB/s beyond, a thread 1 GB/s of it;
    a kernel of torch takes 1 us and 1 us for each MiB read and written.
    """

    multiprocessors = 10
    cache_bytes = MIB
    room_bytes = 16 * MIB

    def __init__(self) -> None:
        self.laid: list[int] = []

    def lay(self, num_bytes: int) -> None:
        self.laid.append(num_bytes)

    def access(self, loads: int) -> float:
        return loads * (100e-9 if self.laid[-1] <= self.cache_bytes else 400e-9)

    def read(self, num_bytes: int, blocks: int, threads: int, loads: int) -> float:
        moved = 64 * loads * blocks * threads
        level = 10e12 if num_bytes <= self.cache_bytes else 2e12
        return moved / min(level, 1e9 * blocks * threads)

    def multiply_add(self, blocks: int, threads: int, operations: int) -> float:
        each = threads * -(-blocks // self.multiprocessors)
        return operations * 8e-9 * max(1.0, each / 512)

    def read_shared(self, blocks: int, threads: int, passes: int) -> float:
        return 64 * passes * blocks * threads / 5e12

    def scale(self, num_bytes: int, least: int) -> list[float]:
        return [1e-6 + 2 * num_bytes / MIB * 1e-6] * least
