"""What a replayed step costs the host besides its graph: `TrainStep` and a graph by hand, in turns.

    python benchmarks/replayed_step.py [--network small_mlp] [--execution graph] [--turns 30]

On a GPU both replay real graphs, and the device is waited for after each turn. On a CPU graphs are those of
the tests' emulation, whose replays do nothing while the clock runs, so that only Python and the copies of the
batch are timed. `own` is what `TrainStep` takes more than the loop by hand that keeps a copy of its loss.
The result goes to `benchmarks/results/`.
"""

import argparse
import contextlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ridgeline.experiments.networks.catalog import catalog
from ridgeline.experiments.result_files import file_name, now, quartiles, this_hardware
from ridgeline.plan import Plan
from ridgeline.runtime.steps.graphs.graph import GraphRunner
from ridgeline.session import TrainStep

RESULTS = Path(__file__).parent / "results"
STEPS = 500
"""In a turn."""
WARM_STEPS = 12


def main() -> None:
    """Run the turns, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="small_mlp")
    parser.add_argument("--execution", default="graph")
    parser.add_argument("--precision", default="as-is")
    parser.add_argument("--turns", type=int, default=30)
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    with contextlib.nullcontext() if has_gpu else _emulated() as replays_nothing:
        step, batch = _step(args, "cuda" if has_gpu else "cpu")
        ways = _ways(step, batch)
        with replays_nothing or contextlib.nullcontext():
            taken = _turns(ways, args.turns, torch.cuda.synchronize if has_gpu else _nothing)
        notes = step.notes
    result = _result(args, taken, notes)
    print(json.dumps(result, indent=1))
    place = RESULTS / file_name("replayed_step", this_hardware("cuda" if has_gpu else "cpu"))
    place = place.with_name(f"{place.stem}_{args.network}.json")
    place.write_text(json.dumps(result, indent=1) + "\n")


@contextlib.contextmanager
def _emulated() -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Graphs of the tests; gives what makes their replays do nothing."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from emulated_graphs import Graph, emulated_graphs

    with emulated_graphs():
        yield mock.patch.object(Graph, "replay", _nothing)


def _nothing(*_: Any) -> None:
    pass


def _step(args: argparse.Namespace, device: str) -> tuple[TrainStep, Any]:
    network = catalog()[args.network]
    setup = network.build(torch.device(device), "gpu", rank=0)
    plan = Plan(execution=args.execution, precision=args.precision)
    step = TrainStep(setup.model, setup.loss_fn, setup.optimizer, plan, device=device)
    for _ in range(WARM_STEPS):
        step(setup.batch)
    return step, setup.batch


def _ways(step: TrainStep, batch: Any) -> dict[str, Callable[[], object]]:
    runner = step._ready()._runner  # noqa: SLF001 - its graph is replayed by hand
    assert isinstance(runner, GraphRunner)
    captured = runner._last  # noqa: SLF001
    assert captured is not None
    tensors = captured.pattern.tensors(batch)
    assert tensors is not None
    pairs = [(static, tensor) for static, tensor in zip(captured.inputs, tensors, strict=True)]
    graph, loss = captured.graph, captured._loss  # noqa: SLF001

    def by_hand() -> Tensor:
        for static, tensor in pairs:
            static.copy_(tensor)
        graph.replay()
        return loss

    return {
        "by hand": by_hand,
        "by hand, its loss copied": lambda: by_hand().clone(),
        "TrainStep": lambda: step(batch),
    }


def _turns(
    ways: dict[str, Callable[[], object]], turns: int, wait: Callable[[], object]
) -> dict[str, list[float]]:
    """Microseconds a step, turn by turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(turns + 1):
        for name, way in ways.items():
            wait()
            begin = time.perf_counter()
            for _ in range(STEPS):
                way()
            wait()
            if number:
                taken[name].append((time.perf_counter() - begin) / STEPS * 1e6)
    return taken


def _result(
    args: argparse.Namespace, taken: dict[str, list[float]], notes: tuple[str, ...]
) -> dict[str, Any]:
    copied, step, hand = (
        taken[name] for name in ("by hand, its loss copied", "TrainStep", "by hand")
    )
    own = [a - b for a, b in zip(step, copied, strict=True)]
    ratios = [a / b for a, b in zip(step, hand, strict=True)]
    return {
        "what": "host time of a replayed step",
        "network": args.network,
        "execution": args.execution,
        "precision": args.precision,
        "date": now(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "replays": "real" if torch.cuda.is_available() else "do nothing",
        "us_a_step": {name: quartiles(values) for name, values in taken.items()},
        "own_us": quartiles(own),
        "times_by_hand": quartiles(ratios),
        "notes": notes,
    }


if __name__ == "__main__":
    main()
