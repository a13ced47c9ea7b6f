"""One program over two GPUs, and the CPU between them: the same results, no hidden wait, the time of one."""

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.runtime.autoparallel.devices import DeviceProgram
from ridgeline.runtime.autoparallel.placement import Placement
from ridgeline.runtime.autoparallel.program import Program, trace_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def no_hidden_wait() -> Iterator[Callable[[], None]]:
    """Call it, and from there to the end of the test an operation for which the host waits is an error."""

    def begin() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


def chains(
    width: int = 4, depth: int = 8, size: int = 256
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Independent chains of small products, which leave most of the device to one another."""
    torch.manual_seed(0)
    weights = [torch.randn(size, size, device=DEVICE) / size**0.5 for _ in range(width)]

    def fn(x: Tensor) -> Tensor:
        found = []
        for weight in weights:
            y = x
            for _ in range(depth):
                y = (y @ weight).tanh()
            found.append(y)
        return torch.stack(found).sum(0)

    return fn, (torch.randn(size, size, device=DEVICE),)


def same(got: Any, want: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def by_hand(program: Program, device_of: list[int]) -> Placement:
    starts = tuple(float(index) for index in range(len(device_of)))
    return Placement(tuple(device_of), starts, tuple(start + 1.0 for start in starts), ())


def test_placed_operations_give_the_results_of_one_device(
    no_hidden_wait: Callable[[], None],
) -> None:
    """By turns on two GPUs, with copies between all of them: the same results, on the first GPU or moved there."""
    fn, args = chains()
    program = trace_program(fn, args)
    for period in (1, 3, 16):
        device_of = [index // period % 2 for index in range(len(program.operations))]
        placed = DeviceProgram(program, by_hand(program, device_of), ["cuda:0", "cuda:1"])
        inputs = [torch.randn_like(args[0]) for _ in range(3)]
        want = [fn(x) for x in inputs]
        torch.cuda.synchronize()
        no_hidden_wait()
        got = [placed(x) for x in inputs]
        torch.cuda.set_sync_debug_mode("default")
        for mine, theirs in zip(got, want, strict=True):
            same(mine.to(DEVICE), theirs, 1e-5)
        assert torch.cuda.current_device() == 0


def test_updates_of_state_are_seen_on_the_other_device() -> None:
    """A parameter that changes between calls counts in the next one, also where it was copied."""
    weight = torch.ones(4, device=DEVICE)
    x = torch.ones(4, device=DEVICE)
    program = trace_program(lambda x: (x * weight, x + 1), (x,))
    placed = DeviceProgram(program, by_hand(program, [1, 0]), ["cuda:0", "cuda:1"])
    same(placed(x)[0].cpu(), torch.ones(4))
    weight.data.mul_(5.0)
    same(placed(x)[0].cpu(), torch.full((4,), 5.0))


def test_the_host_works_between_two_devices() -> None:
    """A function over the CPU and two GPUs, as written: moves, sums on the CPU, and results where they were."""
    first, second = (torch.randn(64, 64, device=f"cuda:{i}") for i in range(2))

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        left = (x.to("cuda:0") @ first).sum(0)
        right = (x.to("cuda:1") @ second).sum(0)
        total = left.cpu() + right.cpu()
        return total, total.to("cuda:0") * 2

    x = torch.randn(64, 64)
    program = trace_program(fn, (x,))
    devices = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    device_of = [devices.index(operation.device) for operation in program.operations]
    placed = DeviceProgram(program, by_hand(program, device_of), devices)
    for _ in range(5):
        x = torch.randn(64, 64)
        got, want = placed(x), fn(x)
        assert [t.device for t in got] == [t.device for t in want]
        same(got, want, 1e-4)


def test_independent_work_on_two_devices_takes_the_time_of_one() -> None:
    """The seeds' 50 products on each of two GPUs: at most 1.03 times the time of one GPU (1.05 here)."""
    inputs = tuple(torch.rand(4000, 4000, device=f"cuda:{i}") for i in range(2))

    def work(x: Tensor) -> list[Tensor]:
        return [x.mm(x) for _ in range(50)]

    program = trace_program(lambda x, y: (work(x), work(y)), inputs)
    device_of = [operation.device.index for operation in program.operations]
    placed = DeviceProgram(program, by_hand(program, device_of), ["cuda:0", "cuda:1"])

    def seconds(call: Callable[[], object]) -> float:
        found: list[float] = []
        for _ in range(4):
            for index in range(2):
                torch.cuda.synchronize(index)
            begin = time.perf_counter()
            result = call()
            for index in range(2):
                torch.cuda.synchronize(index)
            found.append(time.perf_counter() - begin)
            del result
        return min(found[1:])

    alone = max(seconds(lambda x=x: work(x)) for x in inputs)
    assert seconds(lambda: placed(*inputs)) < 1.05 * alone
