"""What a run adds around a small step: plain loop, the step alone, and all that a run does, in turns.

    python benchmarks/around_step.py [--task mlp] [--threads 1] [--rounds 60]

Prints the 10th percentile and the median of each, and their ratio to the plain loop on batches in memory.
Start it with `GOMP_SPINCOUNT=10000`, as workers of `ridgeline train` are, where several threads compute.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ridgeline.feeding import Handover, feed
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.training.fetching import batches
from ridgeline.runtime.training.readings import LossReader
from ridgeline.runtime.training.round import Round
from ridgeline.runtime.training.sampler import Sampler
from ridgeline.tasks import load_task
from ridgeline.workers.blackbox import BlackBox
from ridgeline.workers.world import World

STEPS = 20


def main() -> None:
    """Run the contest and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="mlp")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        ways = _ways(args.task, args.threads, Path(place))
        for round_number in range(args.rounds + 1):
            for name, way in ways.items():
                seconds = way()
                if round_number:
                    taken.setdefault(name, []).extend(seconds)
    plain = statistics.quantiles(taken["plain loop"], n=10)
    print(f"{'way':<24}{'p10 us':>10}{'ratio':>8}{'median us':>12}{'ratio':>8}")
    for name, seconds in taken.items():
        low, *_ = tenths = statistics.quantiles(seconds, n=10)
        print(
            f"{name:<24}{1e6 * low:>10.1f}{low / plain[0]:>8.3f}{1e6 * tenths[4]:>12.1f}"
            f"{tenths[4] / plain[4]:>8.3f}"
        )


def _ways(name: str, threads: int, place: Path) -> dict[str, Callable[[], list[float]]]:
    task = load_task(name, data_dir=None, batch_size=None)
    world = World.join(threads=threads, device="cpu")
    sampler = Sampler(task.train_data, task.batch_size, world, seed=0)
    order = sampler.order(0)
    whole = max(1, sampler.num_samples // task.batch_size)

    def load() -> Iterable[Any]:
        slices = (sampler.slice_of(order, step % whole) for step in range(STEPS))
        return batches(sampler.dataset, slices)

    in_memory = list(load())
    model = task.model()
    optimizer = task.optimizer(model)

    def plain(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        task.loss_fn(model, batch).backward()
        optimizer.step()

    def planned() -> PlannedStep:
        model = task.model()
        plan = Plan(workers=1, threads=threads)
        return PlannedStep(model, task.loss_fn, task.optimizer(model), plan, device="cpu")

    step, reader, handover = planned(), LossReader(world), Handover()
    around = Round(planned(), reader, BlackBox(place / "box.bin"), None)

    def whole_round(batch: Any) -> None:
        around(batch, 1)
        if reader.is_full:
            reader.take(wants_stop=False)

    return {
        "plain loop": lambda: _steps(in_memory, plain),
        "plain loop, loading": lambda: _steps(load(), plain),
        "step alone": lambda: _steps(in_memory, step),
        "as a run does": lambda: _steps(feed(load(), "cpu", handover=handover), whole_round),
    }


def _steps(source: Iterable[Any], act: Callable[[Any], object]) -> list[float]:
    """Seconds from batch to batch, but for the first."""
    taken: list[float] = []
    begin = time.perf_counter()
    for batch in source:
        act(batch)
        end = time.perf_counter()
        taken.append(end - begin)
        begin = end
    return taken[1:]


if __name__ == "__main__":
    main()
