"""Automatic parallelism against what else there is, interleaved, with the gain over the sequential graph.

    python benchmarks/autoparallel.py                    # all cases that this machine can run
    python benchmarks/autoparallel.py --only nasnet_cell,two_gpus
    python benchmarks/autoparallel.py --compile          # torch.compile as a contender, too: minutes

On a GPU: networks with branches, batch 1, loss and gradients, as eager calls, as the sequential CUDA graph of
the function, as the traced program on one stream in a graph, and scheduled over streams. On several GPUs:
independent products on two of them, and a multilayer perceptron that one of them would run alone. On the CPU:
two independent chains of 0.2 ms operators, one thread an operator. Each case is written to the result file as
soon as it is measured. Figures are medians over turns with quartiles; ratios are taken turn by turn.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from autoparallel_networks import TwoChains, chains_of, forked, networks, one_thread, training
from torch import Tensor, nn

from ridgeline.autoparallel.lanes.graph_clock import GraphClock
from ridgeline.autoparallel.parallelize import Parallel, parallelize
from ridgeline.callables.calls.graph import CallGraph
from ridgeline.cli.arguments.output_file import output_file
from ridgeline.experiments.device_names import model_of
from ridgeline.experiments.turns import spread, take_turns, times_faster
from ridgeline.machine import Quantity

RESULTS = Path(__file__).parent / "results"
TURNS = 9
TURN_S = 5e-3

Case = dict[str, Any]
Call = Callable[[], object]


def say(text: str) -> None:
    """Progress, at once."""
    print(text, file=sys.stderr, flush=True)


def on_stream(call: Call, clock: GraphClock) -> Callable[[], float]:
    """Device seconds of a call among others queued behind it, as one turn."""
    once_s = clock.queued_s(call, 10)
    count = max(10, min(100, int(TURN_S / max(once_s, 1e-6))))
    return lambda: clock.queued_s(call, count)


def by_host(call: Call, devices: list[int]) -> Callable[[], float]:
    """Seconds of a call by the host's clock, waiting for the devices, as one turn."""

    def turn() -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        result = call()
        for device in devices:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        del result
        return seconds

    turn()
    return turn


def summary(rivals: Mapping[str, Callable[[], float]], base: str, turns: int = TURNS) -> Case:
    """Medians with quartiles, and how many times faster than `base` each rival is."""
    samples = take_turns(rivals, turns=turns)
    ratios = times_faster(samples, base)

    def fields(quantity: Quantity) -> dict[str, float]:
        return {"median": quantity.value, "low": quantity.low, "high": quantity.high}

    found = {
        name: {"seconds": fields(spread(own)), f"times faster than {base}": fields(ratios[name])}
        for name, own in samples.items()
    }
    for name, row in found.items():
        ratio = row[f"times faster than {base}"]["median"]
        say(f"    {name:24} {row['seconds']['median'] * 1e6:10.1f} us   {ratio:5.2f} x {base}")
    return {"turns": turns, "rivals": found}


def outcome(parallel: Parallel) -> Case:
    """What parallelize reported."""
    report = parallel.report
    say("\n".join(f"    {line}" for line in repr(report).splitlines()))
    return {
        "chosen": report.chosen,
        "reason": report.reason,
        "operations": report.operations,
        "lanes": report.lanes,
        "syncs": report.syncs,
        "predicted_s": report.predicted_s,
        "measured_s": report.measured_s,
        "limit_s": report.bounds.limit_s,
        "critical_path_s": report.bounds.critical_path_s,
        "candidates": [
            {
                "name": row.name,
                "lanes": row.lanes,
                "predicted_s": row.predicted_s,
                "measured_s": row.measured_s,
                "difference": row.difference,
                "note": row.note,
            }
            for row in report.candidates
        ],
    }


def graph_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> CallGraph:
    """The function as it was written, in one CUDA graph."""

    def with_gradients(*inputs: Any) -> Any:
        with torch.enable_grad():
            return fn(*inputs)

    return CallGraph(with_gradients, args)


def run_on_streams(
    fn: Callable[..., Any], args: tuple[Any, ...], compiled: Callable[..., Any] | None = None
) -> Case:
    """Eager, sequential graphs and streams for one function on one GPU."""
    clock = GraphClock(torch.device("cuda", 0))
    with contextlib.ExitStack() as stack:
        begin = time.perf_counter()
        ours = stack.enter_context(parallelize(fn, args))
        seconds = time.perf_counter() - begin
        serial = stack.enter_context(parallelize(fn, args, mode="serial"))
        captured = graph_of(fn, args)
        stack.callback(captured.close)
        calls: dict[str, Call] = {
            "eager": lambda: fn(*args),
            "sequential graph": lambda: captured(*args),
            "program, one stream": lambda: serial(*args),
            "parallelize": lambda: ours(*args),
        }
        if compiled is not None:
            for _ in range(4):
                compiled(*args)
            calls["torch.compile, graphs"] = lambda: compiled(*args)
        case = outcome(ours) | {"preparing_s": seconds}
        rivals = {name: on_stream(call, clock) for name, call in calls.items()}
        case |= summary(rivals, "sequential graph")
    return case


def run_network(name: str, *, compiles: bool) -> Case:
    """One network, forward and backward."""
    module, inputs = networks()[name]
    parameters = list(module.parameters())
    compiled = None
    if compiles:
        compiled = training(torch.compile(module, mode="reduce-overhead"), parameters)
    return run_on_streams(training(module, parameters), inputs, compiled)


def run_gpu_chains() -> Case:
    """Two chains of small products on one GPU."""
    chains = TwoChains(256, 32, "cuda")
    return run_on_streams(chains, chains.args)


def run_two_gpus() -> Case:
    """The seeds' experiment: 50 products of 4000 x 4000 on each of two GPUs."""
    inputs = tuple(torch.rand(4000, 4000, device=f"cuda:{index}") for index in range(2))

    def work(x: Tensor) -> list[Tensor]:
        return [x.mm(x) for _ in range(50)]

    def both(x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return work(x), work(y)

    def in_turn() -> None:
        for x in inputs:
            work(x)
            torch.cuda.synchronize(x.device)

    with parallelize(both, inputs, mode="parallel") as ours:
        case = outcome(ours)
        calls: dict[str, Call] = {
            "one GPU": lambda: work(inputs[0]),
            "other GPU": lambda: work(inputs[1]),
            "both, one after the other": in_turn,
            "both, plain torch": lambda: both(*inputs),
            "both, parallelize": lambda: ours(*inputs),
        }
        rivals = {name: by_host(call, [0, 1]) for name, call in calls.items()}
        return case | summary(rivals, "one GPU", turns=5)


def run_two_gpu_mlp() -> Case:
    """A training step of a two-layer perceptron whose halves of the batch do not depend on each other."""
    torch.manual_seed(0)
    width, rows = 4096, 16384
    weights = [
        nn.Parameter(torch.randn(width, width, device="cuda:0") / width**0.5) for _ in range(2)
    ]
    x = torch.randn(rows, width, device="cuda:0")

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        losses, gradients = [], []
        for half in x.chunk(2):
            loss = ((half @ weights[0]).relu() @ weights[1]).square().sum() / rows
            losses.append(loss.detach())
            gradients.append(torch.autograd.grad(loss, weights))
        return (losses[0] + losses[1], *(a + b for a, b in zip(*gradients, strict=True)))

    devices = ["cuda:0", "cuda:1"]
    with parallelize(fn, (x,), devices=devices, mode="parallel") as ours:
        case = outcome(ours)
        calls: dict[str, Call] = {
            "one GPU, eager": lambda: fn(x),
            "two GPUs, parallelize": lambda: ours(x),
        }
        rivals = {name: by_host(call, [0, 1]) for name, call in calls.items()}
        return case | summary(rivals, "one GPU, eager", turns=7)


def run_cpu_chains() -> Case:
    """Two independent chains of operators of 0.2 ms, one thread an operator."""
    with one_thread(), contextlib.ExitStack() as stack:
        chains = chains_of(2e-4)
        args, depth = chains.args, chains.depth
        say(f"    products of {len(args[0])} x {len(args[0])}")
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))

        def chain(x: Tensor, weight: Tensor) -> Tensor:
            torch.set_num_threads(1)
            for _ in range(depth):
                x = torch.mm(x, weight)
            return x

        def pooled() -> list[Tensor]:
            futures = [pool.submit(chain, *each) for each in zip(args, chains.weights, strict=True)]
            return [future.result() for future in futures]

        ours = stack.enter_context(parallelize(chains, args, lanes=2))
        case = outcome(ours)
        calls: dict[str, Call] = {
            "serial": lambda: chains(*args),
            "torch.jit.fork": forked(*args, *chains.weights, depth),
            "ThreadPoolExecutor": pooled,
            "parallelize": lambda: ours(*args),
        }
        rivals = {name: by_host(call, []) for name, call in calls.items()}
        return case | summary(rivals, "serial", turns=15)


def cases(arguments: argparse.Namespace) -> dict[str, Callable[[], Case]]:
    """What this machine can run, by name."""
    found: dict[str, Callable[[], Case]] = {}
    if torch.cuda.is_available():
        for name in ("inception_block", "nasnet_cell"):
            found[name] = lambda name=name: run_network(name, compiles=arguments.compile)
        found["two_chains_gpu"] = run_gpu_chains
    if torch.cuda.device_count() > 1:
        found |= {"two_gpus": run_two_gpus, "two_gpu_mlp": run_two_gpu_mlp}
    return found | {"two_chains_cpu": run_cpu_chains}


def hardware() -> dict[str, Any]:
    """What it ran on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {
        "gpus": gpus,
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "versions": versions | {"cuda": torch.version.cuda},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def file_name() -> str:
    """`autoparallel_<hardware>_<date>.json`."""
    count = torch.cuda.device_count()
    name = model_of(torch.cuda.get_device_name(0)) if count else f"{os.cpu_count()}-core-CPU"
    date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    return f"autoparallel_{f'{count}x{name}' if count else name}_{date}.json"


def main() -> int:
    """Run the cases one after the other; write what there is after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", help="cases, parted by commas")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="no case begins after so many seconds"
    )
    parser.add_argument(
        "--output", type=output_file, help="JSON file; default: below benchmarks/results/"
    )
    arguments = parser.parse_args()
    begin = time.perf_counter()
    path = arguments.output or RESULTS / file_name()
    path.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": hardware(), "cases": {}, "not_run": {}}
    runs = cases(arguments)
    failures = 0
    for name in arguments.only.split(",") if arguments.only else runs:
        spent_s = time.perf_counter() - begin
        if name not in runs:
            result["not_run"][name] = "this machine lacks what it needs"
        elif spent_s > arguments.limit:
            result["not_run"][name] = (
                f"{spent_s:.0f} s had passed, the limit is {arguments.limit:.0f} s"
            )
        else:
            say(f"{name} ({spent_s:.0f} s)")
            try:
                result["cases"][name] = runs[name]()
            except Exception as error:  # noqa: BLE001 - the other cases are worth having
                failures += 1
                result["not_run"][name] = f"{type(error).__name__}: {error}"
        if name in result["not_run"]:
            say(f"    not run: {result['not_run'][name]}")
        path.write_text(json.dumps(result, indent=1))
    gains = [
        case["rivals"]["parallelize"]["times faster than sequential graph"]["median"]
        for name, case in result["cases"].items()
        if name in ("inception_block", "nasnet_cell")
    ]
    if gains:
        say(
            f"branching networks: {statistics.geometric_mean(gains):.2f} times the sequential graph"
        )
    print(f"written to {path}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
