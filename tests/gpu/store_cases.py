"""Worker script: a store of several workers, each with its GPU, against what one process works out.

torchrun --nproc-per-node N store_cases.py OUTPUT
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from ridgeline.runtime import kvstore
from ridgeline.runtime.kvstore.compression import KeyedCompression
from ridgeline.workers.world import World

sys.path.append(str(Path(__file__).parents[1]))

from sums_by_rank import total

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
SHAPE = (1500, 1200)
"""Large enough that the value is divided among the workers."""
STEPS = 5


def values_of(rank: int, seed: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


def sums(world: World, kind: str) -> dict[str, bool]:
    """Whether the values of each type are what worker 0 gave, then the sum of all."""
    right = {}
    ranks = range(world.size)
    for seed, dtype in enumerate(DTYPES):
        mine = values_of(world.rank, seed, dtype).to(world.device)
        out = torch.empty_like(mine)
        with kvstore.create(kind) as store:
            store.init("w", mine)
            store.pull("w", out)
            begins = torch.equal(out.cpu(), values_of(0, seed, dtype))
            store.push("w", mine)
            mine.zero_()  # a push has read it
            store.pull("w", out)
        wanted = total([values_of(rank, seed, dtype) for rank in ranks])
        right[str(dtype)] = begins and torch.equal(out.cpu(), wanted)
    return right


def trained(world: World, kind: str, **options: int) -> bool:
    """Whether training through the store is that of one process, bit for bit on this device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(world.device)
    alone = [p.detach().clone().requires_grad_() for p in model.parameters()]
    settings = {"lr": 0.01, "foreach": False, "fused": False}
    reference = torch.optim.AdamW(alone, **settings)
    keys = [name for name, _ in model.named_parameters()]
    parameters = [*model.parameters()]
    with kvstore.create(kind, **options) as store:
        store.broadcast(keys, parameters, parameters)
        store.set_optimizer("adamw", rescale_grad=1 / world.size, **settings)
        for step in range(STEPS):
            pushed = [
                [values_of(rank, 7 * step + n, p.dtype, (*p.shape,)) for rank in range(world.size)]
                for n, p in enumerate(parameters)
            ]
            mine = [one[world.rank].to(world.device) for one in pushed]
            store.pushpull(keys, mine, parameters)
            for parameter, one in zip(alone, pushed, strict=True):
                parameter.grad = total([g.to(world.device) for g in one]) * (1 / world.size)
            reference.step()
    return all(torch.equal(p, q) for p, q in zip(parameters, alone, strict=True))


def sparse(world: World, kind: str) -> bool:
    """Whether pushes of sparse rows add up."""
    pushed = []
    for rank in range(world.size):
        ids = torch.tensor([rank, 3, 3])
        rows = values_of(rank, 3, torch.float32, (3, 8))
        pushed.append(torch.sparse_coo_tensor(ids[None], rows, (12, 8), check_invariants=True))
    out = torch.empty(12, 8, device=world.device)
    with kvstore.create(kind) as store:
        store.init("e", torch.zeros(12, 8, device=world.device))
        store.push("e", pushed[world.rank].to(world.device))
        store.pull("e", out)
    return torch.allclose(out.cpu(), total([one.to_dense() for one in pushed]), atol=1e-5)


def compressed(world: World, kind: str) -> bool:
    """Whether a push in 8 bits is the sum of what the codec makes of each worker's part."""
    values = [values_of(rank, 11, torch.float32, (600,)) for rank in range(world.size)]
    codec = KeyedCompression({"type": "int8"})
    wanted = total([codec.decode(codec.encode(rank, v), 600) for rank, v in enumerate(values)])
    out = torch.empty(600, device=world.device)
    with kvstore.create(kind) as store:
        store.init("w", torch.zeros(600, device=world.device))
        store.set_gradient_compression({"type": "int8"})
        store.push("w", values[world.rank].to(world.device))
        store.pull("w", out)
    return torch.allclose(out.cpu(), wanted, atol=1e-6)


def main() -> None:
    world = World.join(threads=2)
    kind = "dist_device_sync"
    found = {
        **sums(world, kind),
        "trained": trained(world, kind),
        "sparse": sparse(world, kind),
        "compressed": compressed(world, kind),
    }
    on_servers = {**sums(world, "dist_sync"), "sparse": sparse(world, "dist_sync")}
    with kvstore.create("dist_async", staleness=0) as store:
        store.init("w", torch.zeros(SHAPE, device=world.device))
        store.set_optimizer("sgd", lr=1.0)
        mine = values_of(world.rank, 5, torch.float32).to(world.device)
        store.push("w", mine)
        out = torch.empty_like(mine)
        store.pull("w", out)
    wanted = -total([values_of(rank, 5, torch.float32) for rank in range(world.size)])
    on_servers["dist_async"] = torch.equal(out.cpu(), wanted)
    told = {"device": str(world.device), kind: found, "through the host": on_servers}
    Path(f"{sys.argv[1]}.{world.rank}").write_text(json.dumps(told))
    World.leave()


if __name__ == "__main__":
    main()
