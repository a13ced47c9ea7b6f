"""Worker script: every case trains a step of ours and DistributedDataParallel side by side.

    torchrun --nproc-per-node 2 parity_cases.py OUTPUT [DEVICE] [EXECUTION] [CASE]

Worker 0 writes, for each case, whether all parameters are bitwise equal and the largest relative
difference after 20 steps, over all workers.
"""

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tensors.batch import to_device
from ridgeline.workers.world import World

STEPS = 20


class Net(nn.Module):
    """Convolution, batch norm, a linear layer that is used only when asked for, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        # Without bias: batch norm makes its gradient pure rounding noise, which AdamW blows up to steps.
        self.conv = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Linear(6 * 64, 24)
        self.optional = nn.Linear(24, 24)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(24, 10)

    def forward(self, x: Tensor, *, use_optional: bool = True) -> Tensor:
        hidden = torch.relu(self.first(torch.relu(self.norm(self.conv(x))).flatten(1)))
        if use_optional:
            hidden = torch.relu(self.optional(hidden))
        return self.last(hidden)


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 12)
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(12, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


class Recomputed(nn.Module):
    """A layer whose buffers backward writes again, where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.optional = nn.Sequential(nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU())
        self.last = nn.Linear(24, 10)

    def forward(self, x: Tensor, *, use_optional: bool) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        if use_optional:
            hidden = hidden + checkpoint(self.optional, hidden, use_reentrant=False)
        return self.last(hidden)


class Blocks(nn.Module):
    """A block repeated three times."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.norm = nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(torch.relu(self.linear(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Blocks.Block() for _ in range(3)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x.flatten(1)))


class TwoTypes(nn.Module):
    """Parameters in single and in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.second = nn.Linear(16, 10).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x.flatten(1))).double()).float()


class Remembering(nn.Module):
    """Buffers that backward reads, that forward exchanges and that are held elsewhere too; a strided weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.strided = nn.Parameter(torch.randn(24, 20)[:, ::2], requires_grad=False)
        self.register_buffer("scale", torch.rand(24))
        self.register_buffer("mean", torch.zeros(24))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        self.scale.mul_(0.9).add_(hidden.detach().abs().mean(0))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        self.count += 1
        return (hidden * self.held[0] - self.mean / self.count) @ self.strided


@dataclass
class Case:
    """What differs from plain training."""

    make: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    batch: Callable[[int, int, torch.Generator], Any] | None = None
    prepare: Callable[[nn.Module], None] | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    schedule: bool = False
    bucket_bytes: tuple[int, ...] = (4000,)
    between: Callable[[nn.Module, int], None] | None = None
    eager_only: bool = False


def images(step: int, rank: int, generator: torch.Generator, size: int = 12) -> Any:
    x = torch.randn(size, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 10, (size,), generator=generator)


def uneven(step: int, rank: int, generator: torch.Generator) -> Any:
    return images(step, rank, generator, 12 if step % 5 else 5 + rank)


def tokens(step: int, rank: int, generator: torch.Generator) -> Any:
    x = torch.randint(0, 10, (12, 5), generator=generator)
    return {"input": x, "target": x.roll(1, 1)}


def switch(step: int, rank: int, generator: torch.Generator, since: int = 0) -> Any:
    return *images(step, rank, generator), step >= since and (step + rank) % 3 == 0


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(
        model(batch["input"]).flatten(0, 1), batch["target"].flatten()
    )


def switched_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0], use_optional=batch[2]), batch[1])


def freeze(model: nn.Module) -> None:
    model.get_submodule("first").requires_grad_(False)


def hold(model: nn.Module) -> None:
    """Keep a buffer in a plain list too, once it stands on its device."""
    model.held.append(model.get_buffer("scale"))  # type: ignore[union-attr,operator]


def halve(parameter: Tensor) -> None:
    parameter.grad *= 0.5  # type: ignore[operator]


def use_kept(model: nn.Module, index: int) -> None:
    """Keep gradients, and views of some, for the next step, and listen to one from the third step on."""
    if index == 2:
        model.get_parameter("last.weight").register_post_accumulate_grad_hook(halve)
    with torch.no_grad():
        for parameter, gradient in vars(model).get("kept", ()):
            parameter.sub_(gradient, alpha=0.01)
    held = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    vars(model)["kept"] = [(p, g if p.dim() == 1 else g.view_as(g)) for p, g in held]


CASES = {
    "plain": Case(),
    "one bucket": Case(bucket_bytes=(1 << 30,)),
    "bucket a gradient": Case(bucket_bytes=(1,)),
    "uneven last batch": Case(batch=uneven),
    "frozen parameters": Case(prepare=freeze),
    "parameters used on some workers only": Case(batch=switch, loss=switched_loss, eager_only=True),
    "layers computed again on some workers only": Case(
        make=Recomputed, batch=switch, loss=switched_loss, eager_only=True
    ),
    "computed again later, on worker 0 first": Case(
        Recomputed, switched_loss, partial(switch, since=3), eager_only=True
    ),
    "computed again later, on worker 1 first": Case(
        Recomputed, switched_loss, partial(switch, since=2), eager_only=True
    ),
    "tied weights, dict batch": Case(make=Tied, batch=tokens, loss=token_loss),
    "two dtypes": Case(make=TwoTypes),
    "accumulation": Case(accumulate=3),
    "clipping": Case(clip_norm=0.05),
    "scheduler": Case(schedule=True),
    "buffers of all kinds": Case(make=Remembering, prepare=hold, eager_only=True),
    "gradients kept, a hook that comes later": Case(between=use_kept, eager_only=True),
    "blocks": Case(make=Blocks),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.003)


def reference_step(
    ddp: DistributedDataParallel,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Any,
    case: Case,
) -> None:
    """One step as the DDP tutorial writes it, with no_sync for accumulation."""
    optimizer.zero_grad()
    size = len(batch[0]) if isinstance(batch, tuple) else len(batch["input"])
    bounds = [size * i // case.accumulate for i in range(case.accumulate + 1)]
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = batch
        if case.accumulate > 1:
            part = tuple(leaf[start:end] for leaf in batch)
        with ddp.no_sync() if index < case.accumulate - 1 else nullcontext():
            (loss_fn(ddp, part) * ((end - start) / size)).backward()
    if case.clip_norm is not None:
        nn.utils.clip_grad_norm_(ddp.parameters(), case.clip_norm)
    optimizer.step()


def run(
    case: Case,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    world: World,
    execution: str = "eager",
) -> Any:
    """Train both, from different seeds a worker so that the initial broadcast matters."""
    loss_fn = case.loss or cross_entropy
    make_batch = case.batch or images
    torch.manual_seed(world.rank)
    ours = case.make()
    torch.manual_seed(world.rank)
    theirs = case.make()
    for model in (ours, theirs):
        model.to(world.device)
        if case.prepare:
            case.prepare(model)
    our_optimizer, their_optimizer = optimizer(ours), optimizer(theirs)
    plan = Plan(
        execution=execution,
        workers=world.size,
        accumulate=case.accumulate,
        sync=Sync(bucket_bytes=case.bucket_bytes),
    )
    step = PlannedStep(
        ours, loss_fn, our_optimizer, plan, clip_norm=case.clip_norm, device=world.kind
    )
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS)
        for o in (our_optimizer, their_optimizer)
        if case.schedule
    ]
    generator = torch.Generator().manual_seed(50 + world.rank)
    for index in range(STEPS):
        batch = to_device(make_batch(index, world.rank, generator), world.device)
        step(batch)
        reference_step(ddp, loss_fn, their_optimizer, batch, case)
        for model in (ours, theirs) if case.between else ():
            case.between(model, index)
        for scheduler in schedulers:
            scheduler.step()
    frames = [(s.name, s.lane) for s in step.timeline().frames]
    reducer: Any = step.synchronizer
    buckets, hooks = len(reducer.buckets), len(reducer._hooks._handles)
    step.close()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    equal = all(torch.equal(a, b) for a, b in pairs)
    gap = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)
    flat = [b.detach().double().flatten() for b in ours.buffers()]
    buffers = torch.cat(flat or [torch.zeros(1, device=world.device, dtype=torch.float64)])
    first = buffers.clone()
    dist.broadcast(first, 0)
    gradients = [p.grad is None for p in ours.parameters()] == [
        p.grad is None for p in theirs.parameters()
    ]
    facts = torch.tensor([equal, torch.equal(first, buffers), gradients], dtype=torch.float64)
    facts = facts.to(world.device)
    dist.all_reduce(facts, op=dist.ReduceOp.MIN)
    worst = torch.tensor([gap], dtype=torch.float64, device=world.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "equal": bool(facts[0]),
        "buffers_follow_worker_0": bool(facts[1]),
        "same_gradients_missing": bool(facts[2]),
        "gap": float(worst),
        "frames": frames,
        "buckets": buckets,
        "hooks": hooks,
    }


def run_partly_used(world: World) -> Any:
    """A parameter that only the first of two micro-batches uses, against the mean by hand.

    DDP synchronises the last micro-batch's parameters only, so it cannot be the reference here.
    """
    torch.manual_seed(0)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (ours, theirs)]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        uses = bool(batch[2][0] == 1)
        return nn.functional.cross_entropy(model(batch[0], use_optional=uses), batch[1])

    step = PlannedStep(ours, loss_fn, optimizers[0], Plan(workers=world.size, accumulate=2))
    generator = torch.Generator().manual_seed(world.rank)
    for index in range(3):
        x, y = images(index, world.rank, generator)
        marks = torch.tensor([1] * 6 + [0] * 6)
        step((x, y, marks))
        optimizers[1].zero_grad()
        for half in (slice(0, 6), slice(6, 12)):
            (loss_fn(theirs, (x[half], y[half], marks[half])) / 2).backward()
        for parameter in theirs.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size
        optimizers[1].step()
    step.close()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    gap = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return {"gap": gap, "frames": [(s.name, s.lane) for s in step.timeline().frames]}


def results_of(world: World, execution: str, case: str | None = None) -> dict[str, Any]:
    """What all cases came to, or one."""
    # A captured step cannot take another way from call to call, as the switched model does.
    cases = {n: c for n, c in CASES.items() if execution == "eager" or not c.eager_only}
    if case is not None:
        cases = {case: cases[case]}
    results = {
        f"{name} / {optimizer.__name__}": run(case, optimizer, world, execution)
        for name, case in cases.items()
        for optimizer in (sgd, adamw)
    }
    if world.kind == "cpu" and execution == "eager":
        results["used in the first micro-batch only"] = run_partly_used(world)
    return results


def main() -> None:
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    execution = sys.argv[3] if len(sys.argv) > 3 else "eager"
    world = World.join(threads=1, device=device)
    results = results_of(world, execution, sys.argv[4] if len(sys.argv) > 4 else None)
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    World.leave()


if __name__ == "__main__":
    main()
