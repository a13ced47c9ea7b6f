"""`ridgeline train` under torchrun: all workers run it side by side, on one host or on several.

The process group is there already, so nothing is launched; rank 0 shows and writes, and what it reads
in the run directory is handed to the others, which may be hosts that do not see it.
"""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ridgeline.cli.arguments.claim import claimed
from ridgeline.cli.command import FINE, USER_ERROR, Output
from ridgeline.cli.training.decision import decide_in_group
from ridgeline.cli.training.order import Order, order_from, resumed_wishes, wishes_from
from ridgeline.cli.training.training_run import conclude, limit_samples_per_s, num_steps, prepare
from ridgeline.cli.training.watch import Watch
from ridgeline.cli.training.worker import work
from ridgeline.codec import Value
from ridgeline.decision.heartbeat import Say
from ridgeline.errors import RidgelineError

if TYPE_CHECKING:
    from ridgeline.workers.world import World


class _Start(Value, frozen=True, kw_only=True):
    """What rank 0 found before anything started: an order, or why there is none."""

    error: str = ""
    order: Order | None = None


def train_in_group(args: argparse.Namespace, output: Output) -> int:
    """Close the loop around one training run, as one of the workers that torchrun started.

    Raises:
        RidgelineError: see `ridgeline.cli.train`; of several workers, each reports it and ends at once.
    """
    from ridgeline.runtime.training.launch import check_plan
    from ridgeline.runtime.training.sampler import check_batch_size
    from ridgeline.workers.world import World

    wishes = wishes_from(args)
    planned = wishes.plan.threads if wishes.plan is not None else 0
    world = World.join(threads=args.threads or planned)
    with _ending_at_once(world), contextlib.ExitStack() as stack:
        order = _agreed_order(args, world, stack, output.progress)
        # Quiet and not left out: all workers run the same code, so that their collectives meet.
        shown = output if world.rank == 0 else Output(is_quiet=True)
        if wishes.plan is not None:
            check_plan(wishes.plan, world.device.type)
        task = order.job.load(order.seed)
        check_batch_size(task.batch_size, world.size)  # before minutes of measuring
        decision = order.decided or decide_in_group(
            task,
            world,
            resumed_wishes(wishes, order),
            seed=order.seed,
            steps=num_steps(task, order.epochs, workers=world.size),
            say=shown.progress,
        )
        if world.rank == 0:
            prepare(order, decision, output)
        with Watch(shown, limit_samples_per_s=limit_samples_per_s(decision)) as watch:
            work(order.request(decision.plan, world.device.type), watch.show)
        if world.rank == 0:
            conclude(Path(order.run_dir), task.name, decision, output)
    # Only where all went well: after an error others may be in a collective for ever.
    World.leave()
    return FINE


def _agreed_order(
    args: argparse.Namespace, world: "World", stack: contextlib.ExitStack, say: Say
) -> Order:
    """The order as rank 0 reads it, which claims the run directory until `stack` is closed."""
    from ridgeline.workers.agree import share_bytes

    start = _Start()
    if world.rank == 0:
        try:
            claim = claimed(args.task, args.output, resume=args.resume)
            run_dir = stack.enter_context(claim)
            start = _Start(order=order_from(args, run_dir, say, workers=world.size))
        # As text, so that all workers end with the same words and none waits for the order.
        except (RidgelineError, OSError) as error:
            start = _Start(error=str(error))
    start = msgspec.json.decode(share_bytes(msgspec.json.encode(start), world), type=_Start)
    if start.order is None:
        raise RidgelineError(start.error)
    return start.order


@contextlib.contextmanager
def _ending_at_once(world: "World") -> Iterator[None]:
    """End this process on an error without leaving the group, which may wait for ever for lost peers."""
    if world.size == 1:
        yield
        return
    try:
        yield
    except RidgelineError as error:
        sys.stderr.write(f"ridgeline: rank {world.rank}: {error}\n")
    except Exception:  # noqa: BLE001 - whatever it is must end the process, and torchrun then the others
        traceback.print_exc()
    else:
        return
    # `os._exit` flushes nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(USER_ERROR)
