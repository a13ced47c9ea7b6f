"""Weak scaling: a step of all workers, the same step without communication, and DDP around the compiler.

    torchrun --standalone --nproc-per-node 4 benchmarks/weak_scaling.py [--networks resnet50 gpt2]

Every worker trains its own batch of a fixed size, so a step without communication (`alone`) is the limit
for any number of workers. The ways of one network take turns in the same warm processes: a figure is the
median over turns of the slowest worker, a ratio is taken turn by turn. The losses of the first steps are
kept beside them: those of worker 0, equal but for rounding in all ways but `alone`. On CPUs the networks
are small and run eagerly, to try the script. `--output` is written anew after each network.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.experiments.draws import labelled, next_tokens
from ridgeline.experiments.networks.catalog import catalog
from ridgeline.experiments.networks.network import Network, Parts, Scale, adamw, sgd
from ridgeline.experiments.networks.result import COMPILE
from ridgeline.experiments.networks.sides.forms import (
    CHANNELS_LAST,
    NetworkSubject,
    optimizer_options,
    plain_forms,
)
from ridgeline.experiments.networks.sides.timing import time_forms
from ridgeline.experiments.result_files import now, quartiles
from ridgeline.experiments.turns import Samples
from ridgeline.experiments.ways.case import WayRunner
from ridgeline.plan import Plan, Precision, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.synchronisation import DEFAULT_ALGORITHM, DEFAULT_BUCKET_BYTES, MIB, offered
from ridgeline.tasks.gpt2 import CLIP_NORM, GPT2, GPT2Config, next_token_loss
from ridgeline.tasks.images import cross_entropy
from ridgeline.tasks.resnet18 import ResNet18
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World

ALONE = "alone"
WARM_STEPS = 6
"""Enough for a graph to be captured and replayed."""


def _resnet18(scale: Scale) -> Parts:
    side = 28 if scale == "gpu" else 8
    return Parts(ResNet18, labelled(32, 1, side, side, classes=10), cross_entropy)


def _gpt2(scale: Scale) -> Parts:
    sizes = {} if scale == "gpu" else {
        "num_blocks": 2, "width": 64, "num_heads": 4, "context_length": 64, "vocabulary_size": 512,
    }  # fmt: skip
    config = GPT2Config(**sizes)
    count = 8 if scale == "gpu" else 2
    draw = next_tokens(count, config.context_length, 256)
    return Parts(partial(GPT2, config), draw, next_token_loss)


OWN = {
    "resnet18": Network(
        name="resnet18",
        kind="classifier, plain convolutions",
        title="ResNet-18 for digits, batch 32 of 28 x 28 for each worker",
        parts=_resnet18,
        make_optimizer=sgd,
    ),
    "gpt2": Network(
        name="gpt2",
        kind="decoder",
        title="GPT-2 small without dropout, 8 x 1024 tokens for each worker",
        parts=_gpt2,
        make_optimizer=adamw,
        clip_norm=CLIP_NORM,
    ),
}
DEFAULT = ("resnet18", "gpt2", "vgg16", "resnet50")


def main() -> None:
    """Be one worker of those that `torchrun` started."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = {**catalog(), **OWN}
    parser.add_argument("--networks", nargs="+", default=DEFAULT, choices=sorted(known))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=0, help="in a turn; 0: as many as fill one")
    parser.add_argument("--seconds", type=float, default=1e9, help="no way is begun after these")
    parser.add_argument(
        "--bucket-mib",
        nargs="+",
        type=lambda text: [float(size) for size in text.split(",")],
        default=[[size / MIB for size in DEFAULT_BUCKET_BYTES], [10.0]],
        help="limits of the buckets in gradient-ready order, one list a way: 4,25 10",
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=[DEFAULT_ALGORITHM],
        choices=offered("cuda" if torch.cuda.is_available() else "cpu"),
        help="by which buckets are exchanged, each with each list of limits",
    )
    parser.add_argument(
        "--output", type=output_file, help="JSON file, e.g. under benchmarks/results/"
    )
    arguments = parser.parse_args()
    begin = time.perf_counter()
    world = World.join(threads=0 if torch.cuda.is_available() else 1)
    found = _about(world)
    for name in arguments.networks:
        measured = _Measured(known[name], world, arguments, begin)
        found["networks"][name] = measured.take()
        if world.rank == 0 and arguments.output:
            _write(arguments.output, found)
    World.leave()


class _Measured:
    """One network: its ways are made while there is time, then take turns."""

    def __init__(
        self, network: Network, world: World, arguments: argparse.Namespace, begin: float
    ) -> None:
        on_gpu = world.kind == "cuda"
        precision: Precision = "bf16" if on_gpu else "as-is"
        scale: Scale = "gpu" if on_gpu else "cpu"
        self._subject = NetworkSubject(
            network=network, world=world, scale=scale, precision=precision
        )
        self._world, self._arguments, self._begin = world, arguments, begin
        self._runners: dict[str, WayRunner] = {}
        self._found: dict[str, Any] = {
            "title": network.title,
            "losses": {},
            "first_s": {},
            "refused": {},
        }

    def take(self) -> dict[str, Any]:
        """All ways in turns: milliseconds, and each way's seconds over those of `alone`."""
        for name, make in _ways(
            self._subject, self._arguments.bucket_mib, self._arguments.algorithms
        ):
            self._add(name, make)
        forms = {name: runner.run for name, runner in self._runners.items()}
        samples: Samples = {}
        if forms:
            turns, steps = self._arguments.turns, self._arguments.steps
            samples = time_forms(forms, self._world, turns=turns, steps=steps)
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        gc.collect()
        torch.compiler.reset()
        found = {**self._found, **_figures(samples)}
        if self._world.rank == 0:
            _show(self._subject.network.name, found)
        return found

    def _add(self, name: str, make: Callable[[], WayRunner]) -> None:
        """Make a way and run its first steps; what one worker cannot do none does."""
        is_late = time.perf_counter() - self._begin > self._arguments.seconds
        if largest_of_workers(float(is_late), self._world):
            self._found["refused"][name] = "no time was left"
            return
        begin = time.perf_counter()
        reason, losses = "", []
        try:
            runner = make()
            losses = [float(runner.run()) for _ in range(WARM_STEPS)]
            self._runners[name] = runner
        except Exception as error:  # noqa: BLE001 - one way's failure is its row
            reason = f"{type(error).__name__}: {error}"[:600]
        told: list[str] = [""] * self._world.size
        dist.all_gather_object(told, reason, group=self._world.group())
        if any(told):
            self._found["refused"][name] = {rank: why for rank, why in enumerate(told) if why}
            self._runners.pop(name, None)
            return
        self._found["losses"][name] = losses
        self._found["first_s"][name] = round(time.perf_counter() - begin, 1)


def _ways(
    subject: NetworkSubject, buckets: Sequence[Sequence[float]], algorithms: Sequence[str]
) -> Iterable[tuple[str, Callable[[], WayRunner]]]:
    """Name to what makes it; DDP is that of users, on GPUs compiled and in the layout that suits it best."""
    world = subject.world
    alone = World(0, 1, world.local_rank, world.device)
    on_gpu = world.kind == "cuda"
    execution = "compiled+graph" if on_gpu else "eager"
    layout: Any = "channels_last" if on_gpu and subject.is_convolutional else "as-is"
    faster: dict[str, Any] = {"kernels": "combined", "random": "compiled"} if on_gpu else {}
    plan = partial(
        Plan, execution=execution, precision=subject.precision, memory_format=layout, **faster
    )
    yield ALONE, partial(_ours, subject, plan(), alone)
    for sizes, algorithm in itertools.product(buckets, algorithms):
        sync = Sync(algorithm=algorithm, bucket_bytes=tuple(round(size * MIB) for size in sizes))
        by = "" if algorithm == DEFAULT_ALGORITHM else f"{algorithm}, "
        name = f"ridgeline, {by}buckets of {', '.join(f'{size:g}' for size in sizes)} MiB"
        yield name, partial(_ours, subject, plan(workers=world.size, sync=sync), world)
    for form in plain_forms(subject):
        is_best = COMPILE in form.name and (CHANNELS_LAST in form.name) == (layout != "as-is")
        if is_best or not on_gpu:
            yield form.name, partial(form.make, subject)


def _ours(subject: NetworkSubject, plan: Plan, world: World) -> WayRunner:
    network, place = subject.network, subject.world
    options = optimizer_options(network, place.device)
    setup = network.build(place.device, subject.scale, rank=place.rank, **options)
    step = PlannedStep(
        setup.model, setup.loss_fn, setup.optimizer, plan, clip_norm=network.clip_norm, world=world
    )
    return WayRunner(run=lambda: step(setup.batch), close=step.close)


def _figures(samples: Samples) -> dict[str, Any]:
    figures: dict[str, Any] = {"milliseconds": {}, f"times_{ALONE}": {}}
    for name, own in samples.items():
        figures["milliseconds"][name] = quartiles([1e3 * seconds for seconds in own])
        if ALONE in samples:
            ratios = [ours / alone for ours, alone in zip(own, samples[ALONE], strict=True)]
            figures[f"times_{ALONE}"][name] = quartiles(ratios)
    return figures


def _show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['title']}")
    for way, ms in found["milliseconds"].items():
        times = found[f"times_{ALONE}"].get(way, {}).get("median", float("nan"))
        losses = found["losses"][way]
        print(
            f"  {way:32} {ms['median']:9.3f} ms ({ms['low']:.3f} to {ms['high']:.3f})"
            f"  {times:6.3f} x alone  loss {losses[0]:.4f} to {losses[-1]:.4f}",
            flush=True,
        )
    for way, reason in found["refused"].items():
        print(f"  {way:32} refused: {reason}", flush=True)


def _about(world: World) -> dict[str, Any]:
    on_gpu = world.kind == "cuda"
    hardware = torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()}-core CPU"
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    with contextlib.suppress(RuntimeError, AttributeError):  # a build without NCCL
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "what": "weak_scaling",
        "date": now()[:10],
        "hardware": f"{world.size} x {hardware}" if on_gpu else hardware,
        "workers": world.size,
        "backend": dist.get_backend() if world.size > 1 else "none",
        "versions": versions,
        "networks": {},
    }


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_suffix(".part")
    partial_file.write_text(json.dumps(found, indent=1) + "\n")
    partial_file.replace(path)


if __name__ == "__main__":
    main()
