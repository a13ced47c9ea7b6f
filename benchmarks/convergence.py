"""Test accuracy after every epoch by what workers send each other: the same seeds, data and schedule.

    python benchmarks/convergence.py                            # two workers, three seeds, every way
    python benchmarks/convergence.py --epochs 4 --seeds 0 --ways all "int8"

Ways are ways to exchange gradients of the bundled digits' resnet18, each beside the same optimizer that
sends everything. A way passes where the mean over the seeds of its accuracy after the last epoch is at most
half a point below that of its reference.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import ridgeline as rl
from ridgeline.cli.arguments.output_file import output_file
from ridgeline.codec import Noun, Value
from ridgeline.experiments.result_files import file_name, now, parser_of
from ridgeline.machine import Host
from ridgeline.probe.host.fingerprint import host
from ridgeline.runtime.training.task import Task
from ridgeline.tasks.images import ImageData
from ridgeline.tasks.load import load_task
from ridgeline.workers.world import World

RESULTS = Path(__file__).parent / "results"
MOST_BELOW = 0.005
"""What a way may lose of accuracy against its reference."""
SGD_RATE, ADAMW_RATE = 0.015, 1e-3

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(parameters: Iterable[nn.Parameter], momentum: float = 0.9) -> Optimizer:
    """The task's own optimizer."""
    return torch.optim.SGD(parameters, lr=SGD_RATE, momentum=momentum, weight_decay=5e-4)


def sgd_without_momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """For what keeps the momentum itself."""
    return sgd(parameters, momentum=0.0)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """What DiLoCo's outer optimizer is meant for."""
    return torch.optim.AdamW(parameters, lr=ADAMW_RATE, weight_decay=0.01)


class Way(NamedTuple):
    """What is sent, the optimizer of each worker, and the way that it is compared with."""

    sync: rl.Sync
    make: Make = sgd
    reference: str = "all"


OUTER = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
WAYS = {
    "all": Way(rl.Sync()),
    "bf16": Way(rl.Sync(compression="bf16")),
    "fp16": Way(rl.Sync(compression="fp16")),
    "int8": Way(rl.Sync(compression="int8")),
    "fp8": Way(rl.Sync(compression="fp8")),
    "powersgd, rank 4": Way(rl.Sync(compression="powersgd", options={"rank": 4})),
    "topk 1 %, own momentum": Way(
        rl.Sync(compression="topk", options={"density": 0.01, "momentum": 0.9, "warmup_steps": 88}),
        sgd_without_momentum,
    ),
    "topk 1 %": Way(rl.Sync(compression="topk", options={"density": 0.01})),
    "sign": Way(rl.Sync(compression="sign")),
    "average every 8": Way(rl.Sync(every=8)),
    "average every 50, 4 fragments, 10 late": Way(
        rl.Sync(every=50, options={"fragments": 4, "delay": 10})
    ),
    "average every 50, 20 late": Way(rl.Sync(every=50, options={"delay": 20})),
    "average every 50, 40 late": Way(rl.Sync(every=50, options={"delay": 40})),
    "average every 50, 40 late, bf16": Way(
        rl.Sync(compression="bf16", every=50, options={"delay": 40})
    ),
    "average every 50, 20 late, int8": Way(
        rl.Sync(compression="int8", every=50, options={"delay": 20})
    ),
    "all, AdamW": Way(rl.Sync(), adamw, "all, AdamW"),
    "DiLoCo every 50, AdamW": Way(rl.Sync(every=50, options=OUTER), adamw, "all, AdamW"),
    "DiLoCo every 50, AdamW, 4 fragments": Way(
        rl.Sync(every=50, options={**OUTER, "fragments": 4}), adamw, "all, AdamW"
    ),
    "DiLoCo every 50, AdamW, 4 fragments, 10 late": Way(
        rl.Sync(every=50, options={**OUTER, "fragments": 4, "delay": 10}), adamw, "all, AdamW"
    ),
    "DiLoCo every 50, AdamW, 20 late": Way(
        rl.Sync(every=50, options={**OUTER, "delay": 20}), adamw, "all, AdamW"
    ),
    "DiLoCo every 50, AdamW, 40 late": Way(
        rl.Sync(every=50, options={**OUTER, "delay": 40}), adamw, "all, AdamW"
    ),
    "DiLoCo every 50, AdamW, 40 late, bf16": Way(
        rl.Sync(compression="bf16", every=50, options={**OUTER, "delay": 40}),
        adamw,
        "all, AdamW",
    ),
    "DiLoCo every 50, AdamW, 20 late, int8": Way(
        rl.Sync(compression="int8", every=50, options={**OUTER, "delay": 20}),
        adamw,
        "all, AdamW",
    ),
}


class Curve(Value, frozen=True, kw_only=True):
    """Test accuracy after each epoch, 0 to 1, of one way from one seed."""

    way: str
    seed: int
    accuracy: tuple[float, ...]


class Convergence(Noun, frozen=True, kw_only=True):
    """All curves, and where they were found."""

    kind: ClassVar[str] = "convergence"

    date: str
    host: Host
    device: str
    torch: str
    workers: int
    batch_size: int
    curves: tuple[Curve, ...]


def batches(task: Task, world: World, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
    """This worker's share of every whole batch of an epoch, in an order that the seed decides."""
    data = task.train_data
    assert isinstance(data, ImageData)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    share = task.batch_size // world.size
    for begin in range(0, len(data) - task.batch_size + 1, task.batch_size):
        first = begin + world.rank * share
        yield tuple(part.to(world.device) for part in data.batch(order[first : first + share]))


def accuracy(task: Task, model: nn.Module, world: World) -> float:
    """Share of the test images that this worker's model tells."""
    data = task.test_data
    assert isinstance(data, ImageData)
    batch = tuple(part.to(world.device) for part in data.batch(torch.arange(len(data))))
    model.eval()
    with torch.no_grad():
        correct = float(task.metric(model, batch))
    model.train()
    return correct / len(data)


def curve(task: Task, world: World, name: str, seed: int, epochs: int) -> Curve:
    """Train from a seed; all workers call this and get worker 0's curve."""
    way = WAYS[name]
    torch.manual_seed(seed)
    model = task.model().to(world.device)
    optimizer = way.make(model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    per_epoch = len(list(batches(task, world, seed, 0)))
    schedule = OneCycleLR(optimizer, rate, total_steps=epochs * per_epoch, cycle_momentum=False)
    plan = rl.Plan(workers=world.size, threads=world.threads, sync=way.sync)
    found = []
    with rl.TrainStep(model, task.loss_fn, optimizer, plan=plan) as step:
        for epoch in range(epochs):
            for batch in batches(task, world, seed, epoch):
                step(batch)
                schedule.step()
            found.append(accuracy(task, model, world))
    return Curve(way=name, seed=seed, accuracy=tuple(found))


def work(arguments: argparse.Namespace) -> None:
    """One of the workers: train every way from every seed; worker 0 writes the curves."""
    world = World.join()
    task = load_task("resnet18")
    curves = []
    for name in arguments.ways:
        for seed in arguments.seeds:
            curves.append(curve(task, world, name, seed, arguments.epochs))
            if world.rank == 0:
                print(f"{name}, seed {seed}: {curves[-1].accuracy[-1]:.4f}", flush=True)
                found(curves, world, task).save(arguments.out)
    World.leave()


def found(curves: list[Curve], world: World, task: Task) -> Convergence:
    """The curves with where they were found."""
    is_cuda = world.device.type == "cuda"
    return Convergence(
        date=now()[:10],
        host=host(),
        device=torch.cuda.get_device_name() if is_cuda else "CPU",
        torch=str(torch.__version__),
        workers=world.size,
        batch_size=task.batch_size,
        curves=tuple(curves),
    )


def report(result: Convergence) -> str:
    """A line for each way: its last accuracies, and how far their mean is from the reference's."""
    last: dict[str, list[float]] = {}
    for entry in result.curves:
        last.setdefault(entry.way, []).append(entry.accuracy[-1])
    lines = [f"{result.workers} workers on {result.device}, torch {result.torch}; test accuracy"]
    for name, ends in last.items():
        line = f"{name:38} {min(ends):7.2%} to {max(ends):7.2%}"
        reference = last.get(WAYS[name].reference)
        if reference is not None and reference is not ends:
            gap = statistics.fmean(ends) - statistics.fmean(reference)
            line += f"  {100 * gap:+5.2f} points  {'met' if gap >= -MOST_BELOW else 'NOT MET'}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    """Start the workers, or be one; then print and write what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=output_file, help="default: below benchmarks/results/")
    parser.add_argument(
        "--report", type=Path, nargs="+", help="print what these files hold together"
    )
    arguments = parser.parse_args()
    if arguments.report:
        parts = [Convergence.load(path) for path in arguments.report]
        curves = tuple(entry for part in parts for entry in part.curves)
        print(report(msgspec.structs.replace(parts[0], curves=curves)))
        return 0
    name = file_name("convergence", f"{arguments.workers}-workers")
    arguments.out = arguments.out or RESULTS / name
    if "RANK" in os.environ:
        work(arguments)
        return 0
    start = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.workers}")
    code = subprocess.call([sys.executable, *start, *sys.argv, "--out", str(arguments.out)])
    if not code:
        print(report(Convergence.load(arguments.out)))
    return code


if __name__ == "__main__":
    sys.exit(main())
