"""What a worker of `asked_workers` does: hand the cases that rank 0 reads to all, and write what they answer."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch.distributed as dist

from ridgeline.workers.world import World

GROUPS = {2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}
"""Number of workers to their ranks in the job: two and three are groups of the four."""


def serve(answer: Callable[[World, dict[str, Any]], dict[str, Any]]) -> None:
    """Answer until the standard input of rank 0 ends.

    Args:
        answer: What this worker, in the world of a case's `size`, has to say of it.
    """
    world = World.join(threads=1, device="cpu")
    rank, store = world.rank, dist.distributed_c10d._get_default_store()
    worlds = {}
    for size, ranks in GROUPS.items():
        group = dist.new_group(list(ranks))
        if rank in ranks:
            worlds[size] = World.join(threads=1, device="cpu", process_group=group)
    for number, line in enumerate(_cases(rank, store)):
        case = json.loads(line)
        told = answer(worlds[case["size"]], case) if case["size"] in worlds else None
        store.set(f"answer {number} of {rank}", json.dumps(told))
        if rank == 0:
            answers = [json.loads(store.get(f"answer {number} of {r}")) for r in range(world.size)]
            sys.stdout.write(json.dumps([one for one in answers if one is not None]) + "\n")
            sys.stdout.flush()
    World.leave()


def _cases(rank: int, store: dist.Store) -> Iterator[str]:
    """Lines that rank 0 reads and hands to all."""
    for number in count():
        if rank == 0:
            store.set(f"case {number}", sys.stdin.readline())
        line = store.get(f"case {number}").decode()
        if not line:
            return
        yield line
