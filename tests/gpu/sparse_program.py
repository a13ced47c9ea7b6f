"""One of several workers that exchange and train sparse gradients over NCCL; run by torchrun.

    sparse_program.py OUTPUT CASES

Every worker writes to OUTPUT.RANK what the means of so many random gradients are (see `sync/sparse_worker.law`), and
what each training leaves beside one process that trains on the CPU.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from ridgeline.workers.world import World

sys.path += [str(Path(__file__).parents[1] / "sync"), str(Path(__file__).parents[1])]

import sparse_worker
from sparse_setups import BEYOND_DDP, TRAINED, by_one


def drawn_case(seed: int, size: int) -> dict[str, Any]:
    """As `sync/test_sparse` draws them."""
    draw = random.Random(seed)
    count = draw.randint(1, 3)
    kinds = ("rows", "rows", "none", "empty", "dense")
    return {
        "seed": seed,
        "kinds": [[draw.choice(kinds) for _ in range(count)] for _ in range(size)],
        "widths": [draw.choice(([3], [1], [2, 2], [])) for _ in range(count)],
        "dtypes": [draw.choice(("float32", "float64", "bfloat16")) for _ in range(count)],
    }


def means(world: World, count: int) -> list[dict[str, Any]]:
    """Cases and what this worker has after each."""
    listed = [drawn_case(seed, world.size) for seed in range(count)]
    return [{"case": case, **sparse_worker.law(world, case)} for case in listed]


def trained(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """How far a training over GPUs is from that of one process on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ours = sparse_worker.run(world, case)
    model, _ = by_one(case, world.size)
    told = ours["told"]
    return {
        "gap": sparse_worker.gap(ours["parameters"], model),
        "same": told["same"],
        "kind": told["kinds"][0],
    }


def main() -> None:
    """Exchange, train, and write what came of it."""
    world = World.join()
    told = {
        "means": means(world, int(sys.argv[2])),
        "trained": {name: trained(world, case) for name, case in {**TRAINED, **BEYOND_DDP}.items()},
    }
    Path(f"{sys.argv[1]}.{world.rank}").write_text(json.dumps(told))
    World.leave()


if __name__ == "__main__":
    main()
