"""Steps that hold buckets over a slow link: measured beside steps that wait, and beside their prediction.

    python benchmarks/held_buckets.py [--rate 100mbit] [--samples 64] [--held 2 6] [--output FILE]

Two workers of one thread train `resnet18` with so many samples a step on two hosts on this machine (network
namespaces, so it takes root and iproute2). Each number of held buckets takes turns with the step that waits,
in the same warm processes, on models that begin with the same bits and see the same batches. A figure is the
median over the steps of all turns, of the slower worker; the bits of all parameters are compared at the end.
Predictions are of the same profile, which is measured over the link before. The first step of a turn is not
timed: a step that holds buckets is timed from where the one before has returned, with its exchanges on their
way.
"""

import argparse
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.experiments.contests import silent
from ridgeline.experiments.namespaces import hosts
from ridgeline.experiments.result_files import parser_of, say
from ridgeline.experiments.sync.training import Training
from ridgeline.machine import Machine, Quantity
from ridgeline.plan import Plan, Sync
from ridgeline.probe.measure import measure
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.simulator.step import simulate
from ridgeline.tracing.capture import trace
from ridgeline.workers.world import World
from ridgeline.workload import Workload

TASK, THREADS, WORKERS = "resnet18", 1, 2
BUCKET_BYTES = 2 << 20
"""Nine buckets."""
WARM_STEPS = 2
"""In which the order of gradients is measured, and buckets are cut again."""


def planned(held: int) -> Plan:
    """The plan that holds so many buckets."""
    options: dict[str, Any] = {"held": held} if held else {}
    sync = Sync(bucket_bytes=(BUCKET_BYTES,), options=options)
    return Plan(workers=WORKERS, threads=THREADS, sync=sync)


class Form:
    """One number of held buckets, with a model of its own.

    Args:
        training: Model, batches and optimizer.
        held: Buckets.
    """

    def __init__(self, training: Training, held: int) -> None:
        self._training = training
        self.model = training.made()
        optimizer = training.optimizer(self.model)
        self.step = PlannedStep(
            self.model, training.loss_fn, optimizer, planned(held), world=training.world
        )
        self._num_steps = 0
        self.seconds: list[float] = []
        for _ in range(WARM_STEPS):
            self._next()
        self.step.wait()

    def turn(self, steps: int) -> None:
        """One step that is not timed, and so many that are, each by the slower of the workers."""
        dist.barrier()
        self._next()
        taken = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._next()
            taken.append(time.perf_counter() - begin)
        self.step.wait()
        slowest = torch.tensor(taken, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.seconds += slowest.tolist()

    def bits(self) -> str:
        """A digest of all parameters and buffers."""
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _next(self) -> None:
        batches = self._training.batches
        self.step(batches[self._num_steps % len(batches)])
        self._num_steps += 1


def worker(args: argparse.Namespace) -> None:
    """Measure, predict and train on one of the hosts; the first writes the result."""
    world = World.join(threads=THREADS, device="cpu")
    tell = say if world.rank == 0 else silent
    training = Training(world, TASK, args.samples // world.size)
    model = training.made()
    workload = trace(
        model, training.loss_fn, training.optimizer(model), training.batches[0], name=TASK
    )
    machine = measure(
        workload=workload, codecs=False, refresh=True, process_group=world.group(), progress=tell
    )
    forms = {held: Form(training, held) for held in (0, *args.held)}
    for turn in range(args.turns):
        for held, form in forms.items():
            form.turn(args.steps)
            tell(f"turn {turn + 1}, held {held}: {form.seconds[-args.steps :]}")
    rows = [row(machine, workload, held, form) for held, form in forms.items()]
    for form in forms.values():
        form.step.close()
    if not world.rank:
        found = {
            "task": TASK,
            "samples": args.samples,
            "rate": args.rate,
            "workers": world.size,
            "bucket_bytes": BUCKET_BYTES,
            "turns": args.turns,
            "steps_a_turn": args.steps,
            "load_average": os.getloadavg()[0],
            "torch": torch.__version__,
            "rows": rows,
        }
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    World.leave()


def row(machine: Machine, workload: Workload, held: int, form: Form) -> dict[str, Any]:
    """What was measured and predicted of one number of held buckets."""
    middle = Quantity.measured(form.seconds, "s")
    predicted_s = simulate(machine, workload, planned(held), details=False).step_ns * 1e-9
    return {
        "held": held,
        "measured_s": middle.value,
        "low_s": middle.low,
        "high_s": middle.high,
        "predicted_s": predicted_s,
        "error": predicted_s / middle.value - 1.0,
        "bits": form.bits(),
    }


def main() -> int:
    """Start a worker on each of two hosts, and print what they found."""
    parser = parser_of(__doc__)
    parser.add_argument("--rate", default="100mbit", help="of the link, e.g. 100mbit")
    parser.add_argument("--samples", type=int, default=64, help="a step, of both workers together")
    parser.add_argument("--held", type=int, nargs="+", default=[2, 6], help="numbers of buckets")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="that are timed in a turn")
    parser.add_argument("--output", type=output_file, default=Path("held_buckets.json"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    with hosts(WORKERS, args.rate) as network:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        started = [
            network.start(
                rank,
                [sys.executable, __file__, *sys.argv[1:], "--worker"],
                environment={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORKERS),
                    "LOCAL_RANK": "0",
                    "GROUP_WORLD_SIZE": str(WORKERS),
                    "MASTER_ADDR": network.hosts[0].address,
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(THREADS),
                },
            )
            for rank in range(WORKERS)
        ]
        codes = [process.wait() for process in started]
    if any(codes):
        return 1
    for found in json.loads(args.output.read_text())["rows"]:
        print(
            f"held {found['held']}: {found['measured_s']:.2f} s ({found['low_s']:.2f} to "
            f"{found['high_s']:.2f}), predicted {found['predicted_s']:.2f} s ({found['error']:+.1%}), "
            f"bits {found['bits']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
