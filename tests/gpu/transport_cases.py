"""Worker script: means of buckets by every algorithm on GPUs, eagerly and in a replayed graph.

torchrun --nproc-per-node N transport_cases.py OUTPUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import PlanError
from ridgeline.plan import Sync
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.loading import make_transport
from ridgeline.runtime.sync.transports.sharded import Sharded
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import ALGORITHMS, offered
from ridgeline.workers.world import World

NUMBERS = (1, 1000, 70_001, 1_500_000, 4_000_000)
"""Elements: one shot, two shots, and more than either takes."""


def values_of(rank: int, seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def run(transport: Transport, bucket: Bucket) -> None:
    """As the reducer does, the copies into the bucket apart; then, where each has its part, all parts."""
    transport.reduce(bucket)
    transport.settle(bucket)
    if isinstance(transport, Sharded) and transport.has_settled:
        transport.gather(bucket.payload)


def gap(world: World, bucket: Bucket, seed: int, numel: int) -> float:
    """How far the mean is from that in double precision, in units of what rounding explains."""
    values = [
        values_of(rank, seed, numel, bucket.flat.dtype).double() for rank in range(world.size)
    ]
    exact = torch.stack(values).mean(0)
    room = torch.stack([v.abs() for v in values]).mean(0) * torch.finfo(bucket.flat.dtype).eps
    found = bucket.payload[:numel].cpu().double()
    return float(((found - exact).abs() / (world.size * room + 1e-30)).max())


def case(world: World, transport: Transport, numel: int, dtype: torch.dtype) -> dict[str, Any]:
    """One bucket: reduced, reduced again in a captured graph, and the graph replayed with other values."""
    parameter = nn.Parameter(torch.zeros(numel, dtype=dtype, device=world.device))
    bucket = Bucket(0, [("p", parameter)], num_parts=world.size, allocate=transport.allocate)
    transport.arranged((bucket,))

    def fill(seed: int) -> None:
        bucket.payload[:numel].copy_(values_of(world.rank, seed, numel, dtype))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which clears the new bucket
    with torch.cuda.stream(stream):
        fill(1)
        run(transport, bucket)
        torch.cuda.synchronize()
        gaps = {"eager": gap(world, bucket, 1, numel)}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run(transport, bucket)
        for seed in (2, 3):
            fill(seed)
            graph.replay()
            torch.cuda.synchronize()
            gaps[f"replay {seed}"] = gap(world, bucket, seed, numel)
    bits = bucket.payload[:numel].contiguous().view(torch.uint8).long()
    sums = torch.stack([bits.sum(), (bits * torch.arange(len(bits), device=bits.device)).sum()])
    graph.reset()
    return {"gaps": gaps, "bits": sums.tolist()}


def cases(world: World, transport: Transport) -> dict[str, Any]:
    """Buckets of all sizes and types."""
    return {
        f"{numel} {dtype}": case(world, transport, numel, dtype)
        for numel in NUMBERS
        for dtype in (torch.float32, torch.bfloat16)
    }


def main() -> None:
    world = World.join(device="cuda")
    found: dict[str, Any] = {}
    # The tree first: its messages are no ring's, and connections that others made would hide how it connects.
    for name in sorted(offered("cuda"), key=lambda name: name != "tree"):
        options = {"local": 2} if any(o.name == "local" for o in ALGORITHMS[name].options) else {}
        if world.size < ALGORITHMS[name].least_workers or (options and world.size % 2):
            continue
        try:
            transport = make_transport(Sync(algorithm=name, options=options), world)
        except PlanError as error:
            found[name] = {"refused": str(error)}
            continue
        found[name] = cases(world, transport)
        if isinstance(transport, Sharded):
            transport.has_settled = True
            found[f"{name}, in halves"] = cases(world, transport)
        transport.close()
    Path(f"{sys.argv[1]}.{world.rank}").write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
