"""Streams and CUDA graphs with branches: the same results, no race, no hidden wait, a gain."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_programs import chains, same
from quiet_device import holds_when_quiet
from torch import Tensor, nn

from ridgeline.autoparallel.costs import measure_costs
from ridgeline.autoparallel.graphs.program import Program, trace_program
from ridgeline.autoparallel.lanes.graph_clock import GraphClock
from ridgeline.autoparallel.lanes.streams import StreamProgram
from ridgeline.autoparallel.parallelize import parallelize
from ridgeline.autoparallel.scheduling.makespan import NodeCost
from ridgeline.autoparallel.selection import candidates
from ridgeline.callables.calls.graph import CallGraph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)


class Separable(nn.Module):
    """ReLU, depthwise and pointwise convolution, normalisation; twice, as in a NASNet cell."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        padding = kernel // 2
        self.layers = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (
                    nn.ReLU(),
                    nn.Conv2d(
                        channels, channels, kernel, padding=padding, groups=channels, bias=False
                    ),
                    nn.Conv2d(channels, channels, 1, bias=False),
                    nn.BatchNorm2d(channels),
                )
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Cell(nn.Module):
    """Five sums of two branches each, all of the same two inputs, joined: a normal cell of NASNet-A."""

    def __init__(self, channels: int = 44) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Separable(channels, kernel) for kernel in (3, 5, 3, 5, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b, c, d, e = self.branches
        pool = nn.functional.avg_pool2d
        return torch.cat(
            [
                a(x) + x,
                b(y) + c(x),
                pool(x, 3, 1, 1) + y,
                pool(y, 3, 1, 1) + pool(y, 3, 1, 1),
                d(y) + e(y),
            ],
            1,
        )


def training(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """Loss and gradients of a module."""
    parameters = list(module.parameters())

    def fn(*inputs: Tensor) -> tuple[Tensor, ...]:
        loss = module(*inputs).square().mean()
        return (loss.detach(), *torch.autograd.grad(loss, parameters))

    return fn


def cell() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    images = torch.randn(2, 1, 44, 28, 28, device=DEVICE)
    return training(Cell().to(DEVICE)), (images[0], images[1])


def schedules(program: Program) -> dict[str, Any]:
    """All candidates, whatever they gain."""
    return candidates(program.dag, [NodeCost(1e-5, 0.1)] * len(program.operations), 8)


@pytest.mark.quiet
def test_costs_follow_the_work() -> None:
    """A large product takes longer than a small one and fills the device; a tiny kernel leaves most of it."""
    large, tiny = torch.randn(8192, 8192, device=DEVICE), torch.randn(8, device=DEVICE)
    program = trace_program(lambda a, b: (a @ a, b + 1), (large, tiny))

    def wrong() -> str:
        product, kernel = measure_costs(program, (large, tiny), known={})
        sync_s = GraphClock(DEVICE).sync_s()
        assert kernel.seconds > 0
        good = product.seconds > 100 * max(kernel.seconds, sync_s) and sync_s >= 0
        good = good and product.fill > 0.9 and kernel.fill < 0.7
        return "" if good else f"{product}, {kernel}, {sync_s * 1e6:.1f} us a sync"

    holds_when_quiet(wrong)


@pytest.mark.parametrize("make", [cell, chains])
def test_streams_give_the_results_of_one_stream(
    make: Callable[[], Any], no_hidden_wait: Callable[[], None]
) -> None:
    """Every candidate, not captured, call after call: what the program gives serially, and no hidden wait."""
    fn, args = make()
    program = trace_program(fn, args)
    with torch.backends.cudnn.flags(deterministic=True):
        inputs = [tuple(torch.randn_like(a) for a in args) for _ in range(3)]
        want = [program.run(*each) for each in inputs]
        runs = [StreamProgram(program, found) for found in schedules(program).values()]
        assert len(runs) > 2
        torch.cuda.synchronize()
        no_hidden_wait()
        got = [[run(*each) for each in inputs] for run in runs]
        torch.cuda.set_sync_debug_mode("default")
    for found in got:
        same(found, want)


@pytest.mark.parametrize("make", [cell, chains])
def test_graphs_with_branches_give_the_results_of_one_stream(
    make: Callable[[], Any], no_hidden_wait: Callable[[], None]
) -> None:
    """Every candidate captured: fresh results for any input, no hidden wait in a call."""
    fn, args = make()
    program = trace_program(fn, args)
    with torch.backends.cudnn.flags(deterministic=True):
        inputs = [tuple(torch.randn_like(a) for a in args) for _ in range(4)]
        want = [program.run(*each) for each in inputs]
        for found in schedules(program).values():
            graph = CallGraph(StreamProgram(program, found), args)
            torch.cuda.synchronize()
            no_hidden_wait()
            got = [graph(*each) for each in inputs]
            torch.cuda.set_sync_debug_mode("default")
            same(got, want)
            graph.close()


def test_memory_of_one_lane_is_not_handed_out_while_another_reads_it() -> None:
    """A slow reader on a second lane sees the value, though the first lane goes on making tensors of its size."""
    x = torch.randn(1 << 22, device=DEVICE)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x * 2
        slow = made
        for _ in range(20):
            slow = slow.sin()
        fast = x + 1
        for _ in range(40):
            fast = fast + 1
        return slow, fast

    program = trace_program(fn, (x,))
    for found in schedules(program).values():
        run = StreamProgram(program, found)
        for _ in range(5):
            same(run(x), fn(x))


def test_a_call_on_any_stream_is_ordered_like_an_operator() -> None:
    """Inputs made just before on the caller's stream are seen, and results are ready for what comes next on it."""
    fn, args = chains()
    program = trace_program(fn, args)
    run = StreamProgram(program, list(schedules(program).values())[-1])
    want = fn(args[0] + 3.0) * 2
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = args[0] + 3.0
            got = run(late) * 2
            del late
            torch.full_like(got, float("nan"))
        stream.synchronize()
        same(got, want, 1e-5)


def test_a_failure_leaves_the_callers_stream_current() -> None:
    """After an operation that fails the current stream is the one of before, and the next call works."""
    fn, args = chains()
    program = trace_program(fn, args)
    run = StreamProgram(program, list(schedules(program).values())[-1])
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        run(torch.randn(3, 3, device=DEVICE))
    assert torch.cuda.current_stream() == before
    same(run(*args), fn(*args), 1e-5)


def test_measuring_leaves_no_trace_in_state() -> None:
    """Running statistics and the generator are as before; a graph then updates them as the module does."""
    norm = nn.BatchNorm2d(8).to(DEVICE)
    x = torch.randn(2, 8, 16, 16, device=DEVICE)

    def fn(x: Tensor) -> Tensor:
        return norm(x).relu() + nn.functional.avg_pool2d(x, 3, 1, 1)

    with torch.no_grad():
        program = trace_program(fn, (x,))
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        random = torch.cuda.get_rng_state()
        measure_costs(program, (x,), known={})
        assert torch.equal(torch.cuda.get_rng_state(), random)
        for name, value in norm.state_dict().items():
            same(value, before[name])
        graph = CallGraph(StreamProgram(program, list(schedules(program).values())[-1]), (x,))
        norm.load_state_dict(before)
        graph(x)
        after = {name: value.clone() for name, value in norm.state_dict().items()}
        norm.load_state_dict(before)
        fn(x)
        for name, value in norm.state_dict().items():
            same(value, after[name], 1e-6)
        graph.close()


@pytest.mark.quiet
@pytest.mark.parametrize(("make", "gain"), [(chains, 1.5), (cell, 1.3)])
def test_independent_small_operations_gain(make: Callable[[], Any], gain: float) -> None:
    """Chains of small products, and a NASNet cell forward and backward: faster than the sequential graph."""
    fn, args = make()

    def wrong() -> str:
        with parallelize(fn, args) as parallel:
            report = parallel.report
            serial = report.row("serial")
            assert serial is not None
            assert serial.measured_s is not None
            return "" if serial.measured_s / report.measured_s > gain else repr(report)

    holds_when_quiet(wrong)


@pytest.mark.quiet
def test_one_large_operation_after_another_gains_nothing() -> None:
    """Where each operation fills the device the report says that nothing is gained."""
    x = torch.randn(8192, 8192, device=DEVICE)

    def wrong() -> str:
        with parallelize(lambda x: (x @ x, x.t() @ x), (x,)) as parallel:
            report = parallel.report
            return "" if report.speedup < 1.05 and report.reason else repr(report)

    holds_when_quiet(wrong)


RACE_CHECK = """
    import sys
    import torch
    from torch.cuda._sanitizer import enable_cuda_sanitizer
    from ridgeline.autoparallel.scheduling.makespan import NodeCost
    from ridgeline.autoparallel.graphs.program import trace_program
    from ridgeline.autoparallel.selection import candidates
    from ridgeline.autoparallel.lanes.streams import StreamProgram
    from ridgeline.autoparallel.lanes.cuda_lanes import CudaLanes

    if sys.argv[1] == "broken":
        CudaLanes.wait = lambda self, node: None

    x = torch.randn(64, 64, device="cuda")
    module = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4)).cuda()

    def fn(x):
        first = x.sin()
        parts = [layer(first).tanh() for layer in module]
        loss = (parts[0] * parts[1] + parts[2] * parts[3]).sum()
        return (loss.detach(), *torch.autograd.grad(loss, list(module.parameters())))

    program = trace_program(fn, (x,))
    costs = [NodeCost(1e-5, 0.1)] * len(program.operations)
    enable_cuda_sanitizer()  # not before: it asks tensors without data for their address
    for schedule in candidates(program.dag, costs, 8).values():
        run = StreamProgram(program, schedule)
        for _ in range(3):
            loss, *gradients = run(x)
            sum(gradient.sum() for gradient in gradients)
    torch.cuda.synchronize()
    print("lanes", max(s.num_lanes for s in candidates(program.dag, costs, 8).values()))
"""


@pytest.mark.parametrize("kind", ["whole", "broken"])
def test_the_sanitizer_sees_no_race(kind: str) -> None:
    """Torch's CUDA sanitizer finds no race in any candidate; without the waits it finds one."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RACE_CHECK), kind],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    is_race = "CSAN detected" in done.stderr or "possible data race" in done.stderr
    assert is_race == (kind == "broken"), done.stdout + done.stderr
    if kind == "whole":
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[-1]) > 1
