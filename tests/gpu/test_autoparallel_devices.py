"""One program over GPUs and the CPU: the same results, no hidden wait, the time of the longest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_programs import chains, same
from quiet_device import holds_when_quiet, in_turns
from torch import Tensor

import ridgeline as rl
from ridgeline.autoparallel.graphs.program import Program, trace_program
from ridgeline.autoparallel.lanes.devices import DeviceProgram
from ridgeline.autoparallel.scheduling.placement import Placement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

DEVICE = torch.device("cuda", 0)


def by_hand(program: Program, device_of: list[int]) -> Placement:
    starts = tuple(float(index) for index in range(len(device_of)))
    return Placement(tuple(device_of), starts, tuple(start + 1.0 for start in starts), ())


@two_gpus
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


@two_gpus
def test_updates_of_state_are_seen_on_the_other_device() -> None:
    """A parameter that changes between calls counts in the next one, also where it was copied."""
    weight = torch.ones(4, device=DEVICE)
    x = torch.ones(4, device=DEVICE)
    program = trace_program(lambda x: (x * weight, x + 1), (x,))
    placed = DeviceProgram(program, by_hand(program, [1, 0]), ["cuda:0", "cuda:1"])
    same(placed(x)[0].cpu(), torch.ones(4))
    weight.data.mul_(5.0)
    same(placed(x)[0].cpu(), torch.full((4,), 5.0))


@two_gpus
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


@pytest.mark.quiet
@two_gpus
def test_independent_work_on_two_devices_takes_the_time_of_one() -> None:
    """The seeds' 50 products on each of two GPUs: at most 1.03 times the time of one GPU (1.05 here)."""
    inputs = tuple(torch.rand(4000, 4000, device=f"cuda:{i}") for i in range(2))

    def work(x: Tensor) -> list[Tensor]:
        return [x.mm(x) for _ in range(50)]

    program = trace_program(lambda x, y: (work(x), work(y)), inputs)
    device_of = [operation.device.index for operation in program.operations]
    placed = DeviceProgram(program, by_hand(program, device_of), ["cuda:0", "cuda:1"])

    def wrong() -> str:
        both, *alone = in_turns(
            {
                "both": lambda: placed(*inputs),
                "first": lambda: work(inputs[0]),
                "second": lambda: work(inputs[1]),
            }
        ).values()
        return "" if both < 1.05 * max(alone) else f"{both:.4f} s against {alone}"

    holds_when_quiet(wrong)


def beside(program: Program) -> DeviceProgram:
    """The program as it was written, the CPU beside the GPU."""
    devices = [torch.device("cpu"), DEVICE]
    device_of = [devices.index(operation.device) for operation in program.operations]
    return DeviceProgram(program, by_hand(program, device_of), devices)


def test_moved_values_are_whole_in_every_result() -> None:
    """Moves of results, inputs, views and parts, read and returned: exactly the function's, call after call.

    The device is kept busy before each call, so that a value read too early would be an old one.
    """
    busy = torch.randn(4096, 4096, device=DEVICE)

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        doubled = y * 2
        remote = doubled.to("cpu")
        part = doubled[1:, :500].t().cpu()
        scale = y.sum().cpu()
        turned = torch.complex(y, doubled).conj().cpu()
        wide = (y * 3).to("cpu", torch.float64)
        back = (remote + 1).to(DEVICE)
        results = (remote + x, remote, remote[0], part, y.t()[1:].cpu(), part.sum(0))
        return (*results, y * scale, turned.resolve_conj(), wide, back, remote.to(DEVICE) + y)

    x = torch.randn(1000, 1000)
    y = x.to(DEVICE)
    placed = beside(trace_program(fn, (x, y)))
    kept: list[tuple[Any, Any]] = []
    for _ in range(10):
        x, y = torch.randn(1000, 1000), torch.randn(1000, 1000, device=DEVICE)
        want = [tensor.clone() for tensor in fn(x, y)]
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)
        got = placed(x, y)
        there = [tensor.clone() for tensor in got]
        same(there, want)
        assert [tensor.stride() for tensor in got] == [tensor.stride() for tensor in fn(x, y)]
        kept.append((got, want))
        # The memory of what the call dropped is handed out again, and overwritten.
        torch.full_like(y, torch.nan)
        torch.full((3000, 1000), torch.nan, device=DEVICE)
    for got, want in kept:
        same(list(got), want)


@pytest.mark.quiet
def test_the_cpu_works_while_the_gpu_computes_and_copies() -> None:
    """Chains on both, as long as each other, the GPU's moved and added: below 0.7 times one after the other."""
    y = torch.randn(4096, 4096, device=DEVICE) / 64
    x = torch.randn(1024, 1024) / 32

    def chain(value: Tensor, num: int) -> Tensor:
        for _ in range(num):
            value = value @ value
            value = value / value.abs().max()
        return value

    short = in_turns({"gpu": lambda: chain(y, 10), "cpu": lambda: chain(x, 4)})
    on_gpu, on_cpu = short["gpu"] / 10, short["cpu"] / 4
    num = max(2, round(0.03 / on_gpu))
    num_cpu = max(1, round(num * on_gpu / on_cpu))

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        remote = chain(y, num)[:1024].to("cpu")
        return chain(x, num_cpu) + remote[:, :1024], remote

    program = trace_program(fn, (x, y))
    placed = beside(program)
    for scale in (1.0, 2.0, 3.0):
        same(placed(x * scale, y + scale), fn(x * scale, y + scale))

    def wrong() -> str:
        found = in_turns({"ours": lambda: placed(x, y), "serial": lambda: fn(x, y)})
        return "" if found["ours"] < 0.7 * found["serial"] else str(found)

    holds_when_quiet(wrong)

    def chosen_as_written() -> str:
        with rl.parallelize(fn, (x, y)) as ours:
            same(ours(x, y), fn(x, y), 1e-4)
            return repr(ours.report) if ours.report.chosen == "serial" else ""

    holds_when_quiet(chosen_as_written)
