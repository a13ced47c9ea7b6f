"""The peak of a step's memory, as traced without running it, against what the allocator held at most.

    python benchmarks/memory_peak.py [--networks resnet50 vgg16] [--output FILE]

On a GPU: `torch.cuda.max_memory_allocated()` over eager steps of a process that holds nothing else. On a CPU:
what the step's tensors held, and every allocation that torch's profiler tells of, added up. The steps are
those after the optimizer has made its state. Each network is a process of its own.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import ridgeline as rl
from ridgeline import units
from ridgeline.cli.output_file import output_file
from ridgeline.experiments.networks.catalog import catalog
from ridgeline.experiments.networks.network import Setup
from ridgeline.simulator.memory import peak_memory_bytes

RESULTS = Path(__file__).parent / "results"
WARM_STEPS = 3
STEPS = 3
BAR = 0.05
NETWORKS = (
    "resnet50", "vgg16", "densenet121", "mobilenet_v2", "convnext_tiny", "vit_b_16", "bert_base",
    "gpt2_transformers", "t5_small", "lstm_language_model", "unet", "dlrm", "graph_attention", "mlp",
)  # fmt: skip
"""At least ten kinds of networks; those whose packages are missing are left out, and named."""


def main() -> int:
    """Measure each network in a process of its own, print the table and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(catalog()))
    parser.add_argument("--output", type=output_file, help="default: below benchmarks/results/")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(_measured(args.networks[0])))
        return 0
    rows = [row for name in args.networks if (row := _in_a_process(name)) is not None]
    errors = sorted(abs(row["error"]) for row in rows)
    print(f"median {statistics.median(errors):.1%}, worst {errors[-1]:.1%} of {len(errors)}")
    (args.output or _place()).write_text(json.dumps(_result(rows), indent=1) + "\n")
    return 0


def _in_a_process(name: str) -> dict[str, Any] | None:
    if missing := catalog()[name].missing:
        print(f"{name:24} left out: {', '.join(missing)} is not installed")
        return None
    command = [sys.executable, __file__, "--networks", name, "--one"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-3000:]}")
    row = json.loads(done.stdout.splitlines()[-1])
    met = "met" if abs(row["error"]) <= BAR else "NOT MET"
    print(
        f"{name:24} traced {units.num_bytes(row['traced']):>10}  held {units.num_bytes(row['held']):>10}  "
        f"{row['error']:+7.1%}  {met}",
        flush=True,
    )
    return row


def _measured(name: str) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setup = catalog()[name].build(device, "gpu" if device == "cuda" else "cpu")
    workload = rl.trace(
        setup.model, setup.loss_fn, setup.optimizer, setup.batch, name=name, may_run=True
    )
    traced = peak_memory_bytes(workload, rl.Plan())
    with rl.TrainStep(
        setup.model, setup.loss_fn, setup.optimizer, rl.Plan(), device=device
    ) as step:
        for _ in range(WARM_STEPS):
            step(setup.batch)
        held = _held_on_gpu(step, setup) if device == "cuda" else _held_on_cpu(step, setup)
    return {"network": name, "traced": traced, "held": held, "error": traced / held - 1.0}


def _held_on_gpu(step: rl.TrainStep, setup: Setup) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step(setup.batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _held_on_cpu(step: rl.TrainStep, setup: Setup) -> int:
    """What was there before a step, and the largest sum of what came and went in it.

    Gradients are not counted as there: the step lets go of them first, which the profiler does not tell of
    what was allocated before it began.
    """
    before = _bytes_of(_tensors(setup))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step(setup.batch)
    now = most = 0
    events = run.profiler.kineto_results.events()
    for event in sorted(
        (each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()
    ):
        now += event.nbytes()
        most = max(most, now)
    return before + most


def _tensors(setup: Setup) -> Iterable[Tensor]:
    yield from setup.model.parameters()
    yield from setup.model.buffers()
    kept = (list(setup.optimizer.state.values()), setup.batch)
    yield from (leaf for leaf in pytree.tree_leaves(kept) if isinstance(leaf, Tensor))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _where() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{len(os.sched_getaffinity(0))}-core-CPU"


def _place() -> Path:
    day = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    return RESULTS / f"memory_peak_{'_'.join(_where().split())}_{day}.json"


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": _where(),
        "torch": str(torch.__version__),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
