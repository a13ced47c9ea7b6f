"""Worker script: workers that train alone between two exchanges, on two workers over gloo, in one start.

torchrun --nproc-per-node 2 local_cases.py OUTPUT
"""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import toy_codec  # registers its entry
import toy_transport  # likewise
from held_runs import begun, held
from local_runs import DELAYED, ENCODED, beside, diverged, put_back, resumed
from seam_cases import fed_back
from torch import Tensor, nn

from ridgeline.errors import WorkloadError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.layout.same_state import checksums
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.synchronisation import offered_compressions
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World

TOYS = (toy_transport, toy_codec)
EVERY, ROUNDS = 4, 3
LIMITS = (256, 1024)


class Net(nn.Module):
    """Three layers, of which the second is used where the batch says so, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before the norm would have gradients of rounding errors only, which AdamW makes steps of.
        self.first, self.norm = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16)
        self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, *, deep: bool = True) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(self.second(hidden).relu() if deep else hidden)


def planned(every: int = EVERY, **sync: Any) -> Plan:
    options = {
        name: sync.pop(name)
        for name in ("outer", "outer_lr", "outer_momentum", "fragments", "delay")
        if name in sync
    }
    return Plan(
        workers=2, threads=1, sync=Sync(bucket_bytes=LIMITS, every=every, options=options, **sync)
    )


def batches(rank: int, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1 + rank)
    found = []
    for _ in range(count):
        x = torch.randn(8, 6, generator=generator)
        found.append((x * (1 + 50 * rank), torch.randint(0, 3, (8,), generator=generator)))
    return found


def losses(*, deep: bool) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: nn.functional.cross_entropy(model(batch[0], deep=deep), batch[1])


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), 1e-2)
    return torch.optim.SGD(model.parameters(), 0.05)


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def sums(tensors: list[Tensor], world: World) -> list[Any]:
    """Checksums of some tensors, by worker."""
    return [
        json.loads(told) for told in gather_bytes(json.dumps(checksums(tensors)).encode(), world)
    ]


def trained(
    world: World, plan: Plan, kind: str = "sgd", *, clip: float | None = None, partly: bool = False
) -> dict[str, Any]:
    """Parameters after each round, and whether all workers had the same bits there, and in between."""
    model = fresh()
    found: dict[str, Any] = {"rounds": [], "equal": [], "apart": []}
    loss_fn = losses(deep=not (partly and world.rank == 0))
    with PlannedStep(
        model, loss_fn, optimizer_of(model, kind), plan, device="cpu", clip_norm=clip
    ) as step:
        for number, batch in enumerate(batches(world.rank, EVERY * ROUNDS), 1):
            step(batch)
            told = sums(values(model), world)
            buffers = sums(list(model.buffers()), world)
            if number % EVERY:
                found["apart"].append(told[0] != told[1] and buffers[0] != buffers[1])
            else:
                found["rounds"].append(values(model))
                found["equal"].append(told[0] == told[1] and buffers[0] == buffers[1])
        found["frames"] = [span.name for span in step.timeline().frames]
        found["notes"] = list(step.notes)
        found["sent_bytes"] = step.synchronizer._transport.sent_bytes  # type: ignore[union-attr]
    return found


def separately(
    kind: str,
    outer: Callable[[nn.Module], Any] | None = None,
    *,
    clip: float | None = None,
    partly: bool = False,
) -> list[list[Tensor]]:
    """The rounds by two workers trained one after the other, each alone, and joined by hand in between.

    Args:
        kind: Of the inner optimizers.
        outer: Makes an outer optimizer of the common model; None takes the mean of the parameters.
        clip: Norm of each worker's own gradients.
        partly: Worker 0 does not use the second layer.
    """
    common = fresh()
    workers = [copy.deepcopy(common) for _ in range(2)]
    inner = [optimizer_of(model, kind) for model in workers]
    outside = None if outer is None else outer(common)
    data = [batches(rank, EVERY * ROUNDS) for rank in range(2)]
    rounds = []
    for number in range(ROUNDS):
        for rank, (model, optimizer) in enumerate(zip(workers, inner, strict=True)):
            for batch in data[rank][number * EVERY : (number + 1) * EVERY]:
                optimizer.zero_grad()
                losses(deep=not (partly and rank == 0))(model, batch).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
        with torch.no_grad():
            for parameter, *own in zip(
                common.parameters(), *(m.parameters() for m in workers), strict=True
            ):
                mean = (own[0].double() + own[1].double()) / 2
                if outside is None:
                    parameter.copy_(mean)
                else:
                    parameter.grad = (parameter.double() - mean).float()
            if outside is not None:
                outside.step()
            for model in workers:
                for mine, theirs in zip(model.parameters(), common.parameters(), strict=True):
                    mine.copy_(theirs)
                for mine, theirs in zip(model.buffers(), workers[0].buffers(), strict=True):
                    mine.copy_(theirs)
        rounds.append(values(common))
    return rounds


def late(delay: int) -> list[list[Tensor]]:
    """Worker 0's parameters after each round, where steps go on while differences travel; by hand."""
    common = fresh()
    workers = [copy.deepcopy(common) for _ in range(2)]
    inner = [optimizer_of(model, "sgd") for model in workers]
    data = [batches(rank, EVERY * ROUNDS) for rank in range(2)]
    sent: list[Tensor] = []
    rounds = []
    for number in range(1, EVERY * ROUNDS + 1):
        for model, optimizer, mine in zip(workers, inner, data, strict=True):
            optimizer.zero_grad()
            losses(deep=True)(model, mine[number - 1]).backward()
            optimizer.step()
        own = [list(model.parameters()) for model in workers]
        with torch.no_grad():
            if number % EVERY == 0:
                sent = [(a.double() + b.double()) / 2 for a, b in zip(*own, strict=True)]
            if number > EVERY and number % EVERY == delay % EVERY:
                for parameter, mean, *both in zip(common.parameters(), sent, *own, strict=True):
                    parameter.copy_(mean)
                    for mine in both:
                        mine.copy_((mine.double() + parameter.double()) / 2)
                for mine, theirs in zip(workers[1].buffers(), workers[0].buffers(), strict=True):
                    mine.copy_(theirs)
        if number % EVERY == 0:
            rounds.append(values(workers[0]))
    return rounds


def gap(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> float:
    pairs = [(a, b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def told(found: dict[str, Any], wanted: list[list[Tensor]]) -> dict[str, Any]:
    """What is told of a training: how far it is from another, and what it was besides."""
    rest = {name: value for name, value in found.items() if name != "rounds"}
    return {**rest, "gap": gap(found["rounds"], wanted)}


def nesterov(rate: float, momentum: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(
        model.parameters(), rate, momentum=momentum, nesterov=momentum > 0
    )


def laws(world: World) -> dict[str, Any]:
    """Trainings beside those of workers that were trained separately."""
    strong = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
    plain = {"outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0}
    average = trained(world, planned())
    found = {
        "average / sgd": told(average, separately("sgd")),
        "average / adamw": told(trained(world, planned(), "adamw"), separately("adamw")),
        "nesterov / adamw": told(
            trained(world, planned(**strong), "adamw"), separately("adamw", nesterov(0.7, 0.9))
        ),
        "clipped": told(trained(world, planned(), clip=0.1), separately("sgd", clip=0.1)),
        "partly": told(trained(world, planned(), partly=True), separately("sgd", partly=True)),
        "by the toy transport": told(
            trained(world, planned(algorithm="gather_all")), separately("sgd")
        ),
        "nesterov at rest": told(trained(world, planned(**plain)), average["rounds"]),
        "by the toy codec": told(trained(world, planned(compression="coarse")), average["rounds"]),
    }
    found["exchanging gradients"] = told(average, trained(world, planned(every=1))["rounds"])
    return found


def with_a_teacher(world: World) -> dict[str, Any]:
    """A teacher that the loss moves after its student: when all workers had its bits; and a frozen backbone."""
    student, teacher, backbone = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 6)
    model = nn.ModuleDict({"student": student, "teacher": teacher, "backbone": backbone})
    teacher.requires_grad_(False)
    backbone.requires_grad_(False)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(its, 0.5)
            wanted = teacher(batch[0])
        return (student(backbone(batch[0])) - wanted - 1.0).square().mean()

    found: dict[str, Any] = {"rounds": [], "between": [], "moved": []}
    with PlannedStep(model, loss_fn, optimizer_of(student, "sgd"), planned(), device="cpu") as step:
        for number, batch in enumerate(batches(world.rank, EVERY * ROUNDS), 1):
            version = backbone.weight._version
            step(batch)
            told = sums(values(teacher), world)
            if number % EVERY != 1:  # when students are still the same
                found["between" if number % EVERY else "rounds"].append(told[0] == told[1])
            found["moved"].append(backbone.weight._version != version)
    return found


def by_every_codec(world: World, wanted: list[list[Tensor]]) -> dict[str, Any]:
    """Trainings with each compression, beside the plain one."""
    ways = {name: planned(compression=name) for name in offered_compressions("cpu")}
    return {name: told(trained(world, plan), wanted) for name, plan in ways.items()}


def all_exchanged(world: World) -> list[bool]:
    """Whether every parameter of some sizes is exchanged, in buckets and fragments of some sizes."""
    found = []
    for sizes in ((6, 6, 6), (1, 40, 3, 3), (17,), (5, 9, 2, 30, 1, 8)):
        for limit in (4, 40, 64, 10_000):
            for fragments in (1, 2, 3):
                model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in sizes])
                sync = Sync(bucket_bytes=(limit,), every=3, options={"fragments": fragments})
                plan = Plan(workers=2, threads=1, sync=sync)
                optimizer = torch.optim.SGD(model.parameters(), 1.0)
                with PlannedStep(model, weighed, optimizer, plan, device="cpu") as step:
                    for _ in range(3):
                        step(torch.tensor(-1.0 - world.rank))
                    common = torch.cat([place for _, place in step.synchronizer.common()])  # type: ignore[union-attr]
                # Of fragments that were exchanged after one or two steps the common ones are so far only.
                found.append(
                    bool((common > 0).all()) and (fragments > 1 or bool((common == 4.5).all()))
                )
    return found


def weighed(model: nn.Module, weight: Tensor) -> Tensor:
    return sum((p.sum() for p in model.parameters()), torch.zeros(())) * weight


def in_fragments(world: World) -> dict[str, Any]:
    """The parameters that became the same on both workers, by step."""
    model = fresh()
    became: dict[int, list[str]] = {}
    plan = planned(every=5, fragments=3)
    with PlannedStep(
        model, losses(deep=True), optimizer_of(model, "sgd"), plan, device="cpu"
    ) as step:
        for number, batch in enumerate(batches(world.rank, 10), 1):
            step(batch)
            by_name = zip(model.named_parameters(), *sums(values(model), world), strict=True)
            became[number] = [name for (name, _), first, second in by_name if first == second]
    return {"became": became, "names": [name for name, _ in model.named_parameters()]}


def messages(world: World) -> dict[str, str]:
    """What worker 0 is told where workers hold what they should hold alike and do not."""

    def run(
        change: Callable[[nn.Module, torch.optim.Optimizer, PlannedStep], object], before: int
    ) -> str:
        model = fresh()
        optimizer = optimizer_of(model, "adamw")
        try:
            with PlannedStep(model, losses(deep=True), optimizer, planned(), device="cpu") as step:
                for number, batch in enumerate(batches(world.rank, 2 * EVERY)):
                    if number == before and world.rank:
                        change(model, optimizer, step)
                    step(batch)
        except WorkloadError as error:
            return str(error)
        return ""

    def set_rate(_: nn.Module, optimizer: torch.optim.Optimizer, __: PlannedStep) -> None:
        optimizer.param_groups[0]["lr"] = 0.5

    def write(model: nn.Module, _: torch.optim.Optimizer, __: PlannedStep) -> None:
        with torch.no_grad():
            model.first.weight.add_(1.0)  # type: ignore[operator]

    def write_common(_: nn.Module, __: torch.optim.Optimizer, step: PlannedStep) -> None:
        step.synchronizer.common()[0][1].add_(1.0)  # type: ignore[union-attr]

    def count(model: nn.Module, _: torch.optim.Optimizer, step: PlannedStep) -> None:
        step.synchronizer.num_steps = 7  # type: ignore[union-attr]

    return {
        "written first": run(write, 0),
        "written later": run(write, 2),
        "rate set": run(set_rate, 2),
        "common written": run(write_common, 2),
        "steps counted apart": run(count, 0),
    }


def main() -> None:
    world = World.join(threads=1, device="cpu")
    output = Path(sys.argv[1])
    found = {
        "laws": laws(world),
        "codecs": by_every_codec(world, separately("sgd")),
        "fed back": fed_back(
            world,
            nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3)),
            planned(compression="coarse"),
        ),
        "all exchanged": all_exchanged(world),
        "fragments": in_fragments(world),
        "teacher": with_a_teacher(world),
        "delayed": {
            str(delay): gap(trained(world, planned(delay=delay))["rounds"], late(delay))
            for delay in (1, 3)
        },
        "encoded beside steps": {
            name: gap(trained(world, planned(delay=3, compression=name))["rounds"], late(3))
            for name in offered_compressions("cpu")
        },
        "held": held(world),
        "begun": begun(world),
        "messages": messages(world),
        "beside": beside(world),
        "put back": put_back(world),
        "delayed, put back": put_back(world, DELAYED, {"local_steps", "common", "flying"}),
        "encoded, put back": put_back(
            world, ENCODED, {"local_steps", "common", "flying", "residual"}
        ),
        "resumed": resumed(world, output.parent),
        "delayed, resumed": resumed(world, output.parent / "delayed", DELAYED, stops=(4, 6)),
        "encoded, resumed": resumed(world, output.parent / "encoded", ENCODED, stops=(4, 6)),
        "diverged": diverged(world, output.parent),
    }
    if world.rank == 0:
        output.write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
