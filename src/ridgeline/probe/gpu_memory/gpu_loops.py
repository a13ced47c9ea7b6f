"""The loops of `gpu_levels` on the current GPU, each timed by events around it."""

import torch
from torch import Tensor

from ridgeline.machine.stairs import WORD_BYTES
from ridgeline.probe.gpu import kernel_samples, sleep
from ridgeline.probe.gpu_memory.gpu_kernels import kernels
from ridgeline.probe.timing import device_seconds

LINE_BYTES = 128
"""A line of the caches of NVIDIA's GPUs. Source: CUDA C++ Programming Guide, on global memory."""
MOST_OF_FREE = 0.25
MOST_WARMING = 1 << 17
"""Loads before the first sample of a walk: through 16 MiB."""
SCALED_S = 0.02
WARM_S, WARM_SIDE = 0.3, 2048
LAUNCHED_CYCLES = 200_000
"""About 0.1 ms: the host launches what is timed in less."""


class CudaLoops:
    """Loops on the current GPU; see `GpuLoops`, whose methods these are.

    Kernels are compiled when the first of them is called.

    Cost: the GPU for 0.3 s, so that its clock is up. Of its memory what the largest call asks for, and while
        a walk is laid a quarter more.
    """

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self._device)
        self.multiprocessors = int(properties.multi_processor_count)
        self.cache_bytes = int(properties.L2_cache_size)
        self.room_bytes = int(MOST_OF_FREE * torch.cuda.mem_get_info(self._device)[0])
        self._at = self._made(1)
        self._sink = torch.zeros(1, dtype=torch.float32, device=self._device)
        self._words = self._made(0)
        self._first = 0
        x = torch.ones(WARM_SIDE, WARM_SIDE, device=self._device)
        kernel_samples(lambda: torch.mm(x, x), seconds=WARM_S)

    def lay(self, num_bytes: int) -> None:
        """In the first word of each line the address of the next one: a circle through all; warms caches.

        Raises:
            MachineError: kernels cannot be compiled.
        """
        self._at.copy_(lay_walk(self._memory(num_bytes)))
        self.access(min(num_bytes // LINE_BYTES, MOST_WARMING))

    def access(self, loads: int) -> float:
        """Seconds of so many loads, each of which waits for the one before it."""
        return self._timed("ridgeline_chase", 1, 1, self._at, loads)

    def read(self, num_bytes: int, blocks: int, threads: int, loads: int) -> float:
        """Seconds of four times so many loads of 16 bytes by each thread; the next call goes on there."""
        words = num_bytes // 16
        # Behind what the call before has read, whose lines the cache still holds.
        first = self._first % words
        self._first = first + 4 * blocks * threads * loads
        memory = self._memory(num_bytes)
        arguments = (memory, words - 1, first, loads, self._sink)
        return self._timed("ridgeline_read_levels", blocks, threads, *arguments)

    def multiply_add(self, blocks: int, threads: int, operations: int) -> float:
        """Seconds of so many multiply-adds by each thread."""
        return self._timed("ridgeline_multiply_adds", blocks, threads, operations, self._sink)

    def read_shared(self, blocks: int, threads: int, passes: int) -> float:
        """Seconds of so many times 64 bytes of shared memory by each thread; 1024 of them at most."""
        return self._timed("ridgeline_read_shared", blocks, threads, passes, self._sink)

    def scale(self, num_bytes: int, least: int) -> list[float]:
        """Samples of a tensor of 32-bit floats that is multiplied in place."""
        x = self._memory(num_bytes).view(torch.float32).fill_(1.0)
        return kernel_samples(lambda: x.mul_(1.0), seconds=SCALED_S, least=least)

    def _made(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)

    def _memory(self, num_bytes: int) -> Tensor:
        """So many bytes in words of 8, the same ones again and again."""
        count = num_bytes // WORD_BYTES
        if count > self._words.numel():
            # Let go of first, or both sizes would be held at once.
            self._words = self._made(0)
            torch.cuda.empty_cache()  # else each size would be held beside the next
            self._words = self._made(count)
        return self._words[:count]

    def _timed(self, name: str, blocks: int, threads: int, *arguments: Tensor | int) -> float:
        launch = kernels()[name]
        sleep(LAUNCHED_CYCLES)  # else the launch would be in the seconds
        return device_seconds(
            lambda: launch(grid=(blocks, 1, 1), block=(threads, 1, 1), args=[*arguments])
        )


def lay_walk(words: Tensor) -> Tensor:
    """Write a random walk into the first word of each line: the address of the next, one circle through all.

    Args:
        words: [n] int64, contiguous; n is a multiple of the words of a line.

    Returns:
        [1] int64, on the same device: the address that it begins with.

    Cost: for a while a quarter of the memory of `words` again.
    """
    per_line = LINE_BYTES // WORD_BYTES
    order = torch.randperm(words.numel() // per_line, device=words.device)
    # Byte addresses in the words themselves: each load then needs nothing but the one before.
    addresses = order.mul(LINE_BYTES).add_(words.data_ptr())
    words[order.mul_(per_line)] = addresses.roll(-1)
    return addresses[:1]
