"""Worker script: every codec in training steps of some workers over gloo, in one start.

torchrun --nproc-per-node N codec_cases.py OUTPUT
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import msgspec
import torch
import torch.distributed as dist
from seam_cases import Net, Shuffled, resumed
from test_codec_laws import CODECS
from torch import Tensor, nn

from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.simulator.exchange.synchronising import sent_bytes
from ridgeline.workers.world import World
from ridgeline.workload import Parameter
from strategies import make_workload

STEPS = 6
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "accumulated and clipped": {"accumulate": 2, "clip_norm": 0.5},
    "partly": {"partly": True},
}
RESUMED = tuple(
    (n, o) for n, o in CODECS if n in ("int8", "powersgd", "sign") or "warmup_steps" in o
)
"""Runs that are stopped and taken up again: with what each kind of codec remembers."""
BY_WORKERS = {2: tuple(KINDS), 3: ("plain", "partly"), 4: ("plain", "accumulated and clipped")}
"""Two workers meet every kind of step, others what depends on their number."""


def planned(name: str, options: dict[str, Any], workers: int, accumulate: int = 1) -> Plan:
    sync = Sync(compression=name, options=options, bucket_bytes=(256, 1024))
    return Plan(workers=workers, threads=1, accumulate=accumulate, sync=sync)


def predicted(model: nn.Module, order: tuple[str, ...], plan: Plan) -> int:
    """Bytes that a worker hands over in a step."""
    known = dict(model.named_parameters())
    parameters = tuple(
        Parameter(
            name=name,
            shape=tuple(known[name].shape),
            dtype=str(known[name].dtype).removeprefix("torch."),
            num_bytes=known[name].numel() * known[name].element_size(),
            is_trainable=True,
            ready_op=4,
        )
        for name in order
    )
    workload = msgspec.structs.replace(make_workload(), parameters=parameters, ready_order=order)
    return sum(sent_bytes(workload, plan))


def trained(
    plan: Plan,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype = torch.float32,
    clip_norm: float | None = None,
    partly: bool = False,
) -> dict[str, Any]:
    """What some steps come to: parameters, whether all have the same, and bytes of a step."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank = dist.get_rank(group)
    deep = not (partly and rank)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0], deep=deep).float(), batch[1])

    generator = torch.Generator().manual_seed(1 + rank)
    sent = [0]
    with PlannedStep(
        model, loss_fn, optimizer, plan, device="cpu", clip_norm=clip_norm, process_group=group
    ) as step:
        reducer: Any = step.synchronizer
        for _ in range(STEPS):
            x = torch.randn(8, 6, generator=generator).to(dtype)
            step((x, torch.randint(0, 3, (8,), generator=generator)))
            sent.append(reducer._transport.sent_bytes)
        order = [name for bucket in reducer.buckets for name in bucket.names]
        wanted = predicted(model, order, plan)
    flat = torch.cat([p.detach().flatten().float() for p in model.parameters()])
    others = [torch.empty_like(flat) for _ in range(plan.workers)]
    dist.all_gather(others, flat, group=group)
    return {
        "parameters": flat.tolist(),
        "same": all(torch.equal(flat, other) for other in others),
        "finite": bool(flat.isfinite().all()),
        "counted": sent[-1] - sent[-2],
        "predicted": wanted,
    }


def main() -> None:
    world = World.join(threads=1, device="cpu")
    output = Path(sys.argv[1])
    found: dict[str, Any] = {}
    pair = dist.new_group([0, 1]) if world.size == 3 else None
    for name, options in (("none", {}), *CODECS):
        cases = {}
        for kind in BY_WORKERS[world.size]:
            settings = KINDS[kind]
            plan = planned(name, options, world.size, settings.get("accumulate", 1))
            rest = {key: value for key, value in settings.items() if key != "accumulate"}
            cases[kind] = trained(plan, None, **rest)
        if pair is not None and world.rank < 2:
            cases["group"] = trained(planned(name, options, 2), pair)
        if world.size == 2 and (name, options) in RESUMED:
            folder = output.parent / f"{name}-{len(found)}"
            cases["resumed"] = resumed(world, folder, planned(name, options, 2), Shuffled)
        found[f"{name} {options}"] = cases
    if world.rank == 0:
        output.write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
