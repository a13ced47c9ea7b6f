"""`rl.hybridize` on a GPU: graphs with ordinary semantics, or with the caller's own inputs and outputs."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quiet_device import holds_when_quiet, in_turns
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ridgeline.callables.calls.graph import NUM_TURNS, CallGraph
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import BatchError, CaptureError
from ridgeline.plan import Execution

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GRAPHS: tuple[Execution, ...] = ("graph", "compiled+graph")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 2)
    return nn.Sequential(*layers).cuda()


def draw(rows: int = 1) -> Tensor:
    return torch.randn(rows, 512, device="cuda")


def same(got: Any, fn: Callable[..., Any], *args: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(got, fn(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", GRAPHS)
def test_any_input_and_fresh_results(mode: Execution) -> None:
    """Inputs anywhere in memory, in any layout; results held by the caller are never overwritten."""
    module = mlp()
    with hybridize(module, draw(), mode) as hybrid:
        held = []
        for index in range(5 * NUM_TURNS):
            wide = torch.randn(4, 1024, device="cuda")
            x = (wide[1:2, ::2], wide[:1, 3:515], draw())[index % 3]
            held.append((x, hybrid(x)))
        for x, got in held:
            same(got, module, x)
        assert len({got.data_ptr() for _, got in held}) == len(held)
        assert hybrid.report.counters["eager_calls"] == 0


@pytest.mark.parametrize("holder", ["tensor", "view", "list"])
def test_whoever_holds_a_part_of_a_result_keeps_it(holder: str) -> None:
    """A view, an element of a list or the tensor itself keep the memory of a result from being reused."""
    graph = CallGraph(lambda x: x * 2, (torch.zeros(4, device="cuda"),))
    kept = []
    for value in range(6):
        result = graph(torch.full((4,), float(value), device="cuda"))
        kept.append({"tensor": result, "view": result[1:], "list": [result]}[holder])
        del result
    for value, part in enumerate(kept):
        tensor = part[0] if isinstance(part, list) else part
        assert bool((tensor == 2.0 * value).all())
    graph.close()
    assert bool((tensor == 10.0).all())


def test_a_result_that_is_dropped_gives_its_memory_to_a_later_one() -> None:
    """In a loop that keeps only the last result the graphs take turns and nothing is copied."""
    graph = CallGraph(lambda x: x + 1, (torch.zeros(4, device="cuda"),))
    addresses, result = set(), None
    for value in range(8):
        result = graph(torch.full((4,), float(value), device="cuda"))
        addresses.add(result.data_ptr())
    assert len(addresses) == NUM_TURNS
    assert result is not None
    assert bool((result == 8.0).all())
    graph.close()


def test_an_input_handed_back_is_a_copy() -> None:
    """A function that returns its argument does not hand out the memory that the next call writes."""
    graph = CallGraph(lambda x: (x, x + 1), (torch.zeros(4, device="cuda"),))
    first, _ = graph(torch.ones(4, device="cuda"))
    graph(torch.zeros(4, device="cuda"))
    assert bool((first == 1.0).all())
    graph.close()


@pytest.mark.parametrize("mode", GRAPHS)
def test_inputs_are_read_wherever_they_are(mode: Execution) -> None:
    """The example, the slots of a ring and new tensors, each written between calls; results are held."""
    module, x, ring = mlp(), draw(), [draw() for _ in range(3)]
    with hybridize(module, x, mode) as hybrid:
        held = []
        for turn in range(300):
            slot = (x, ring[turn % 3], draw())[turn % 5 % 3]
            slot.normal_()
            got = hybrid(slot)
            if turn % 7 == 0:
                held.append((got, slot.clone()))
        for got, was in held:
            same(got, module, was)


def test_the_copy_of_an_input_is_no_launch_of_its_own() -> None:
    """One launch a call, whatever the address."""
    with hybridize(mlp(), draw(), "graph") as hybrid:
        inputs = [draw() for _ in range(5)]
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
        ) as profiler:
            for x in inputs:
                hybrid(x)
            torch.cuda.synchronize()
        calls = [event.name for event in profiler.events()]
        assert sum("cudaGraphLaunch" in name for name in calls) == len(inputs)
        assert not [name for name in calls if "cudaMemcpyAsync" in name or "cudaLaunch" in name]


def test_another_layout_at_the_same_address_is_right() -> None:
    """Read by columns, with another sign, conjugated; and an example that is not dense itself."""
    square = draw(512)
    graph = CallGraph(lambda x: x * 2, (square,))
    for x in (square, square.t(), torch._neg_view(square), torch.cat((square, square), 1)[:, ::2]):
        torch.testing.assert_close(graph(x), 2 * x)
    graph.close()
    sparse = draw(8)[:, :64:2]
    graph = CallGraph(lambda x, more: x + more[0], (sparse, [square[:8, :32]]))
    for x in (sparse, sparse.contiguous(), sparse):
        torch.testing.assert_close(graph(x, [square[8:16, :32]]), x + square[8:16, :32])
    graph.close()
    number = torch.randn(64, dtype=torch.complex64, device="cuda")
    graph = CallGraph(lambda x: x * 2, (number,))
    for x in (number, number.conj(), number):
        torch.testing.assert_close(graph(x), 2 * x)
    graph.close()


def test_calls_on_several_streams_keep_their_order() -> None:
    """The graph's memory is shared, so a call on another stream waits for the one before."""
    module = mlp()
    with hybridize(module, draw(), "graph") as hybrid:
        streams = [torch.cuda.Stream() for _ in range(2)]
        inputs, results = [draw() for _ in range(20)], []
        torch.cuda.synchronize()
        for index, x in enumerate(inputs):
            with torch.cuda.stream(streams[index % 2]):
                results.append(hybrid(x))
        torch.cuda.synchronize()
        for x, got in zip(inputs, results, strict=True):
            same(got, module, x)


@pytest.mark.parametrize("mode", GRAPHS)
def test_static_io(mode: Execution) -> None:
    """The caller writes `.inputs`; results stand in the same memory; weights updated in place are seen."""
    module = mlp()
    with hybridize(module, draw(), mode, static_io=True) as hybrid:
        addresses = set()
        for _ in range(3):
            x = draw()
            hybrid.inputs[0].copy_(x)
            result = hybrid()
            addresses.add(result.data_ptr())
            same(result, module, x)
            with torch.no_grad():
                next(module.parameters()).mul_(1.5)
        assert len(addresses) == 1
        same(hybrid(x), module, x)
        with pytest.raises(BatchError, match="wanted arguments like the example"):
            hybrid(draw(2))


@pytest.mark.parametrize("mode", GRAPHS)
def test_weights_shapes_and_gradients(mode: Execution) -> None:
    """In-place and replaced weights are followed; a second shape is captured, a third runs eagerly."""
    module = mlp()
    with hybridize(module, draw(), mode) as hybrid:
        x = draw()
        with torch.no_grad():
            next(module.parameters()).mul_(2)
        same(hybrid(x), module, x)
        module.load_state_dict({k: v * 0.5 for k, v in module.state_dict().items()}, assign=True)
        same(hybrid(x), module, x)
        for rows in (2, 3):
            y = draw(rows)
            same(hybrid(y), module, y)
        assert hybrid.report.counters == {"eager_calls": 1, "shapes": 3, "rebuilds": 1}
        grad = draw().requires_grad_()
        hybrid(grad).sum().backward()
        assert grad.grad is not None
        with pytest.raises(BatchError, match=r"wanted argument leaf 0 on cuda:0"):
            hybrid(torch.randn(1, 512))


def test_dropout_goes_on_between_replays() -> None:
    """Random state is no constant of the graph, and the generator's seed is honoured."""
    module = nn.Dropout(0.5).cuda()
    x = torch.ones(64, device="cuda")
    with hybridize(module, x, "graph") as hybrid:
        assert len({tuple(hybrid(x).tolist()) for _ in range(6)}) == 6
        torch.manual_seed(7)
        first = hybrid(x).clone()
        torch.manual_seed(7)
        assert torch.equal(first, module(x))


def test_a_constant_baked_into_the_graph_is_caught() -> None:
    """A Python counter gives other results when replayed: refused by name, rejected in auto."""
    calls = [0]

    def count(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * calls[0]

    x = torch.randn(8, device="cuda")
    with pytest.raises(CaptureError, match=r"got one that writes calls \(a list\)"):
        hybridize(count, x, "graph")
    assert calls == [0]
    with hybridize(count, x, budget_s=5.0) as hybrid:
        assert hybrid.mode == "eager"
        assert hybrid.report.row("graph").status != "measured"  # type: ignore[union-attr]


def test_a_value_read_to_the_host_is_refused_before_the_capture() -> None:
    """The linter names it, and the process goes on."""
    x = torch.randn(8, device="cuda")
    with pytest.raises(CaptureError, match="wanted a program that a CUDA graph can hold"):
        hybridize(lambda t: t * t.abs().max().item(), x, "graph")
    assert bool((x + 1 - 1).isfinite().all())


def test_a_graph_that_is_never_closed_does_not_hold_up_the_end() -> None:
    """The interpreter ends by itself, with graphs and results alive."""
    program = (
        "import torch\n"
        "from ridgeline.callables.hybridize import hybridize\n"
        "kept = hybridize(torch.nn.Linear(4, 4).cuda(), torch.randn(1, 4, device='cuda'), 'graph')\n"
        "result = kept(torch.randn(1, 4, device='cuda'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=500, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.quiet
def test_a_small_network_is_faster_as_a_graph() -> None:
    """1000 calls of the MLP, in turns: ordinary semantics well above eager, static_io above that."""
    module, x = mlp(), draw()
    with (
        hybridize(module, x, "compiled+graph") as ordinary,
        hybridize(module, x, "compiled+graph", static_io=True) as static,
        torch.no_grad(),
    ):

        def thousand(run: Callable[[], Any]) -> Callable[[], None]:
            def calls() -> None:
                for _ in range(1000):
                    run()

            return calls

        runs: dict[str, Callable[[], None]] = {
            "eager": thousand(lambda: module(x)),
            "ordinary": thousand(lambda: ordinary(x)),
            "static": thousand(static),
        }

        def wrong() -> str:
            best = in_turns(runs)
            good = best["eager"] > 2 * best["ordinary"] and best["ordinary"] > best["static"]
            return "" if good else str(best)

        holds_when_quiet(wrong)
