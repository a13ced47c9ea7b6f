"""Data-parallel training: Ridgeline, DistributedDataParallel and a plain single process, interleaved.

    python benchmarks/data_parallel.py --workers 2                 # two CPU processes, gloo
    python benchmarks/data_parallel.py --workers 8 --precision bf16  # eight GPUs, NCCL

All contenders train the same modified ResNet-18 from the same state on the same batches in the same
processes. They take turns, a few steps each, so that a change of the machine's speed meets all of them;
the figures are medians over the turns with quartiles, and ratios are taken turn by turn. Before anything
is timed, the parameters after some steps are compared.

On CPUs the global batch is fixed and divided (`plain` runs it whole on all cores). On GPUs the batch per
GPU is fixed (weak scaling) and `alone` is our step without communication: the limit that the same execution
can reach with any number of workers. The result goes to `benchmarks/results/`.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.execution import MODES
from ridgeline.experiments.hybrid.check import distance
from ridgeline.experiments.networks.sides.timing import time_forms
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.experiments.result_files import now, parser_of
from ridgeline.experiments.turns import times_faster
from ridgeline.machine import Quantity
from ridgeline.plan import Plan, Sync
from ridgeline.probe.measure import measure
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.synchronisation import DEFAULT_BUCKET_BYTES
from ridgeline.tasks.images import cross_entropy
from ridgeline.tasks.resnet18 import ResNet18
from ridgeline.workers.world import World

RESULTS = Path(__file__).parent / "results"
ONE_BUCKET = 1 << 40
"""Bytes, more than any model has."""
CHECKED_STEPS = 8
"""Enough for a graph to be captured and replayed; more would only amplify the last bit."""


class WholeBatch:
    """CPU only: the global batch in one process on all cores, while the other workers rest."""

    def __init__(self, world: World, arguments: argparse.Namespace) -> None:
        model = make_model(world)
        self.model = model
        self._is_running = world.rank == 0
        precision = "as-is" if arguments.precision == "double" else arguments.precision
        self._step = plain(model, model, precision)
        self._batch = make_batches(world, arguments.batch * world.size, arguments.side)[0]
        self._threads = torch.get_num_threads()

    def __call__(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One training step on the global batch."""
        if not self._is_running:
            return torch.zeros(())
        torch.set_num_threads(os.cpu_count() or 1)
        try:
            return self._step(self._batch)
        finally:
            torch.set_num_threads(self._threads)


def plain(model: nn.Module, called: nn.Module, precision: str) -> PlainStep:
    """The loop everybody writes, around DDP or alone."""
    return PlainStep(model, called, cross_entropy, sgd(model), precision=precision)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)


def make_model(world: World) -> nn.Module:
    """The same ResNet-18 everywhere, in torch's default type."""
    torch.manual_seed(0)
    model = ResNet18(num_classes=10).to(world.device)
    return model.to(memory_format=torch.channels_last) if world.device.type == "cuda" else model


def make_batches(world: World, batch: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Four batches of this worker's own, on its device."""
    generator = torch.Generator().manual_seed(100 + world.rank)
    batches = []
    for _ in range(4):
        images = torch.randn(batch, 1, side, side, generator=generator, dtype=torch.float32)
        images = images.to(torch.get_default_dtype())
        labels = torch.randint(0, 10, (batch,), generator=generator)
        batches.append((images.to(world.device), labels.to(world.device)))
    return batches


def contenders(world: World, arguments: argparse.Namespace) -> dict[str, Callable[[Any], Tensor]]:
    """Name to step function; every one has a model of its own, built alike."""
    precision = "as-is" if arguments.precision == "double" else arguments.precision
    chosen: dict[str, Callable[[Any], Tensor]] = {}
    if world.size > 1:
        for name, options in {
            "ddp": {},
            "ddp tuned": {"gradient_as_bucket_view": True, "static_graph": True},
            # The order of additions follows the size of the buckets: what that alone changes.
            "ddp our buckets": {"bucket_cap_mb": arguments.bucket_bytes[-1] / (1 << 20)},
        }.items():
            model = make_model(world)
            chosen[name] = plain(model, DistributedDataParallel(model, **options), precision)
    for name, plan in our_plans(world, arguments, precision).items():
        model = make_model(world)
        chosen[f"ridgeline {name}"] = PlannedStep(model, cross_entropy, sgd(model), plan)
    if world.device.type == "cuda" and world.size > 1:
        for execution in arguments.executions:
            model = make_model(world)
            alone = World(0, 1, world.local_rank, world.device)
            plan = Plan(execution=execution, precision=precision, kernels="combined")
            chosen[f"alone {execution}"] = PlannedStep(
                model, cross_entropy, sgd(model), plan, world=alone
            )
    if world.device.type == "cpu" and world.size > 1:
        chosen["plain process"] = WholeBatch(world, arguments)
    else:
        model = make_model(world)
        chosen["plain"] = plain(model, model, precision)
    return chosen


def our_plans(world: World, arguments: argparse.Namespace, precision: str) -> dict[str, Plan]:
    """A plan for each execution; compiled whole, gradients come at once, so one bucket is tried as well."""
    plans = {}
    for execution in arguments.executions:
        sync = Sync(bucket_bytes=tuple(arguments.bucket_bytes))
        plan = Plan(
            execution=execution,
            precision=precision,
            kernels="combined",
            workers=world.size,
            sync=sync,
        )
        plans[execution] = plan
        if MODES[execution].form == "compiled" and world.size > 1:
            one = Sync(bucket_bytes=(ONE_BUCKET,))
            plans[f"{execution}, one bucket"] = msgspec.structs.replace(plan, sync=one)
    return plans


def check(world: World, arguments: argparse.Namespace, batches: list[Any]) -> dict[str, float]:
    """Train all contenders on the same batches with deterministic kernels; their differences."""
    torch.backends.cudnn.deterministic = True
    alone = ("alone", "plain") if world.size > 1 else ()
    everyone = contenders(world, arguments)
    if arguments.precision == "bf16":
        # What rounding to 16 bits changes by itself: kernels that round elsewhere may differ by as much.
        model = make_model(world)
        everyone["reference in float32"] = plain(model, wrapped(model, world), "as-is")
    compared = {name: step for name, step in everyone.items() if not name.startswith(alone)}
    differences = largest_difference(compared, batches, "ddp" if world.size > 1 else "plain")
    close(everyone)
    torch.backends.cudnn.deterministic = False
    return differences


def wrapped(model: nn.Module, world: World) -> nn.Module:
    """The model as the reference calls it."""
    return DistributedDataParallel(model) if world.size > 1 else model


def close(steps: dict[str, Any]) -> None:
    """Release graphs and threads."""
    for step in steps.values():
        if isinstance(step, PlannedStep):
            step.close()


def largest_difference(
    steps: dict[str, Any], batches: list[Any], reference: str
) -> dict[str, float]:
    """Parameters after some equal steps against the reference's, relative to their change."""
    initial = [p.detach().clone() for p in steps[reference].model.parameters()]
    for step in steps.values():
        for index in range(CHECKED_STEPS):
            step(batches[index % len(batches)])
    wanted = [p.detach() for p in steps[reference].model.parameters()]
    change = distance(wanted, initial)
    return {
        name: distance([p.detach() for p in step.model.parameters()], wanted) / change
        for name, step in steps.items()
    }


def time_turns(
    steps: dict[str, Any], batches: list[Any], world: World, turns: int, per_turn: int
) -> dict[str, list[float]]:
    """Seconds per step of each contender, one figure a turn; the slowest worker counts."""
    following = {name: itertools.cycle(batches) for name in steps}
    forms = {
        name: lambda name=name, step=step: step(next(following[name]))
        for name, step in steps.items()
    }
    return time_forms(forms, world, turns=turns, steps=per_turn)


def summary(figures: Quantity) -> dict[str, float]:
    """Median and quartiles in seconds."""
    return {
        "median_s": figures.value,
        "low_s": figures.low,
        "high_s": figures.high,
        "turns": figures.n,
    }


def work(arguments: argparse.Namespace) -> None:
    """One worker's share; rank 0 prints and writes the result."""
    world = World.join(threads=arguments.threads)
    if arguments.precision == "double":
        torch.set_default_dtype(torch.float64)  # tells rounding from mistakes in the check
    batches = make_batches(world, arguments.batch, arguments.side)
    differences = check(world, arguments, batches)
    steps = contenders(world, arguments)
    base = "ddp" if world.size > 1 else "plain"
    samples = time_turns(steps, batches, world, arguments.turns, arguments.per_turn)
    close(steps)
    World.leave()
    if world.rank == 0:
        publish(arguments, world, steps, samples, differences, base)


def publish(
    arguments: argparse.Namespace,
    world: World,
    steps: dict[str, Any],
    samples: dict[str, list[float]],
    differences: dict[str, float],
    base: str,
) -> None:
    """Print the table and write the JSON file."""
    ours = [step for step in steps.values() if isinstance(step, PlannedStep)]
    on_gpu = world.device.type == "cuda"
    hardware = torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()}-core CPU"
    result = {
        "what": "data_parallel",
        "date": now()[:10],
        "hardware": f"{world.size} x {hardware}" if on_gpu else hardware,
        "machine": msgspec.to_builtins(msgspec.structs.replace(measure(), timings=())),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "arguments": vars(arguments) | {"output": str(arguments.output)},
        "plans": {
            name: repr(step.plan) for name, step in steps.items() if isinstance(step, PlannedStep)
        },
        "notes": [note for step in ours for note in step.notes],
        "difference_to_reference_over_update": differences,
        "seconds_per_step": {
            name: summary(Quantity.measured(own, "s")) for name, own in samples.items()
        },
        f"times_faster_than_{base}": {
            name: summary(ratio) for name, ratio in times_faster(samples, base).items()
        },
        "overhead_s_per_step": {
            name: step.timeline().counters.get("overhead_ns", 0.0) * 1e-9
            for name, step in steps.items()
            if isinstance(step, PlannedStep)
        },
    }
    width = max(map(len, result["seconds_per_step"]))
    for name in differences.keys() - result["seconds_per_step"].keys():
        print(f"{name} (not timed) differs by {differences[name]:.1e}")
    print(f"{'':{width}} {'ms per step':>12} {'quartiles':>17} {'x ' + base:>8}  difference")
    for name, row in result["seconds_per_step"].items():
        faster = result[f"times_faster_than_{base}"][name]["median_s"]
        quartiles = f"{row['low_s'] * 1e3:.2f} .. {row['high_s'] * 1e3:.2f}"
        gap = f"{differences[name]:.1e}" if name in differences else ""
        print(f"{name:{width}} {row['median_s'] * 1e3:12.3f} {quartiles:>17} {faster:8.2f}  {gap}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {arguments.output}")


def main() -> int:
    """Start the workers, or be one."""
    parser = parser_of(__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--workers", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument(
        "--threads", type=int, default=0 if on_gpu else 1, help="per worker, on CPUs"
    )
    parser.add_argument("--batch", type=int, default=32, help="samples per worker")
    parser.add_argument("--side", type=int, default=28 if on_gpu else 8, help="height and width")
    parser.add_argument("--precision", choices=("as-is", "bf16", "double"), default="as-is")
    parser.add_argument("--bucket-bytes", type=int, nargs="+", default=[*DEFAULT_BUCKET_BYTES])
    parser.add_argument(
        "--executions",
        nargs="+",
        default=["eager", "graph"] if on_gpu else ["eager"],
        help="ways to run our step",
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--per-turn", type=int, default=50 if on_gpu else 3, help="steps per turn")
    parser.add_argument(
        "--output", type=output_file, help="JSON file, e.g. under benchmarks/results/"
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ or arguments.workers == 1:
        work(arguments)
        return 0
    launch = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(arguments.workers),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads or 1)}
    return subprocess.run(
        [sys.executable, *launch, __file__, *sys.argv[1:]], env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
