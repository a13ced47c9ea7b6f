"""Worker script: what tests want of two workers that train with a toy transport and a toy codec.

torchrun --nproc-per-node 2 seam_cases.py OUTPUT
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stopped_runs
import torch
from torch import Tensor, nn

from ridgeline.errors import CheckpointError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.checkpoints.checkpointing import gathered, of_worker
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.state.snapshot import Snapshot
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World

STEPS = 12


class Net(nn.Module):
    """Two layers, of which the second is used where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, *, deep: bool = True) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(self.second(hidden).relu() if deep else hidden)


class Shuffled(Net):
    """Of layers that are not used in the order in which they are made, nor in the opposite one."""

    def __init__(self) -> None:
        super().__init__()
        first = self.first
        del self.first
        self.first = first


def planned(**sync: Any) -> Plan:
    return Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(256, 1024), **sync))


def trained(world: World, plan: Plan, *, partly: bool = False) -> dict[str, Any]:
    """Parameters after some steps, with frames of the last; `partly`: one worker skips a layer."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    deep = not (partly and world.rank)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0], deep=deep), batch[1])

    generator = torch.Generator().manual_seed(1 + world.rank)
    with PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        for _ in range(STEPS):
            x = torch.randn(8, 6, generator=generator)
            step((x, torch.randint(0, 3, (8,), generator=generator)))
        frames = [span.name for span in step.timeline().frames]
        sent = step.synchronizer._transport.sent_bytes  # type: ignore[union-attr]
    return {
        "parameters": [p.detach().flatten().tolist() for p in model.parameters()],
        "frames": frames,
        "sent_bytes": sent,
    }


def fed_back(world: World, model: nn.Module, plan: Plan) -> dict[str, Any]:
    """What arrived of gradients that do not depend on the parameters, and what was left out."""
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(7 + world.rank)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        pairs = zip(model.parameters(), batch, strict=True)
        return sum(((p * g).sum() for p, g in pairs), torch.zeros(()))

    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    largest = []
    with PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        start = {name: p.detach().double() for name, p in model.named_parameters()}
        for _ in range(400):
            batch = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
            for total, gradient in zip(sums.values(), batch, strict=True):
                total.add_(gradient)
            step(batch)
            state = step.synchronizer.state_dict()  # type: ignore[union-attr]
            left = [value for name, value in state.items() if name.startswith("residual.")]
            largest.append(max(float(value.abs().max()) for value in left))
    gaps = []
    for name, parameter in model.named_parameters():
        arrived = start[name] - parameter.detach().double()
        wanted = sums[name] - state[f"residual.{name}"].double()
        torch.distributed.all_reduce(wanted)
        gaps.append(float((arrived - wanted / 2).abs().max()))
    return {"gap": max(gaps), "early": max(largest[:100]), "late": max(largest[-100:])}


def resumed(
    world: World, folder: Path, plan: Plan, net: Callable[[], nn.Module] = Net
) -> dict[str, Any]:
    """Whether a run that was stopped and taken up again ends with the bits of one that was not."""
    found = stopped_runs.resumed(
        world,
        folder,
        plan,
        net,
        lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        stops=(8,),
        checkpoint_every=2,
    )
    return found[8]


def put_back(world: World) -> dict[str, bool]:
    """What a snapshot and a checkpoint do with what was left out."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = planned(compression="coarse")
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(world.rank))
    with PlannedStep(
        model, lambda m, b: m(b).square().mean(), optimizer, plan, device="cpu"
    ) as step:
        step(batch)
        synchronizer = step.synchronizer
        assert synchronizer is not None
        before = {name: value.clone() for name, value in synchronizer.state_dict().items()}
        snapshot = Snapshot(model, optimizer, None, synchronizer)
        all_states = gathered(synchronizer, world)
        step(batch)
        moved = any(not torch.equal(before[n], v) for n, v in synchronizer.state_dict().items())
        snapshot.restore()
        same = all(torch.equal(before[n], v) for n, v in synchronizer.state_dict().items())
        mine = of_worker(all_states, world.rank)
    return {
        "moved": moved,
        "restored": same,
        "gathered": all(torch.equal(mine[n], before[n]) for n in before) and len(mine) > 0
        if world.rank == 0
        else not mine,
        "apart": world.rank > 0
        or any(
            not torch.equal(of_worker(all_states, 0)[n], of_worker(all_states, 1)[n])
            for n in before
        ),
    }


class Unreadable:
    """A synchronizer whose state one worker cannot take."""

    def __init__(self, *, is_sound: bool) -> None:
        self.is_sound = is_sound

    def state_dict(self) -> dict[str, Tensor]:
        if not self.is_sound:
            raise OSError("the file is gone")
        return {"left": torch.ones(3)}


def unreadable(world: World) -> list[str]:
    """What the gathering raises on each worker."""
    synchronizer: Any = Unreadable(is_sound=world.rank == 0)
    mine = ""
    try:
        gathered(synchronizer, world)
    except (CheckpointError, OSError) as error:
        mine = f"{type(error).__name__}: {error}"
    return [told.decode() for told in gather_bytes(mine.encode(), world)]


def main() -> None:
    import toy_codec  # noqa: F401 - registers its entry, here alone
    import toy_transport  # noqa: F401 - likewise

    world = World.join(threads=1, device="cpu")
    output = Path(sys.argv[1])
    found = {
        "plain": trained(world, planned()),
        "toy": trained(world, planned(algorithm="gather_all")),
        "plain, partly": trained(world, planned(), partly=True),
        "toy, partly": trained(world, planned(algorithm="gather_all"), partly=True),
        "codec": trained(world, planned(compression="coarse")),
        "codec over toy": trained(world, planned(algorithm="gather_all", compression="coarse")),
        "fed back": fed_back(world, Net(), planned(compression="coarse")),
        "put back": put_back(world),
        "unreadable": unreadable(world),
        "resumed": resumed(world, output.parent, planned(compression="coarse")),
    }
    if world.rank == 0:
        output.write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
