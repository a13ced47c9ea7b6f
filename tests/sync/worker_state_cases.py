"""Worker script: scripts that save and load what a worker alone remembers, on two workers over gloo.

torchrun --nproc-per-node 2 worker_state_cases.py OUTPUT
"""

import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.errors import CheckpointError
from ridgeline.workers.world import World

STEPS, STOP = 9, 5
"""Five is in the midst of a period of three steps."""
CASES: dict[str, rl.Sync] = {
    "none": rl.Sync(),
    "sharded": rl.Sync(algorithm="sharded"),
    "kvstore": rl.Sync(algorithm="kvstore"),
    **{
        name: rl.Sync(compression=name, bucket_bytes=(256, 1024))
        for name in ("bf16", "int8", "fp8", "powersgd", "sign")
    },
    "topk": rl.Sync(compression="topk", options={"density": 0.2, "warmup_steps": 4}),
    "topk of one layer": rl.Sync(compression="topk", options={"density": 0.2}),
    "local": rl.Sync(every=3),
    "local int8": rl.Sync(every=3, compression="int8"),
    "diloco": rl.Sync(every=3, options={"outer": "nesterov"}),
    "streaming": rl.Sync(every=4, options={"outer": "nesterov", "fragments": 2, "delay": 1}),
}


class Net(nn.Module):
    """Has buffers, and a layer that the second worker leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16)
        self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, *, deep: bool) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(self.second(hidden).relu() if deep else hidden)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0], deep=batch[2]), batch[1])


def batches(rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [
        (
            torch.randn(8, 6, generator=generator),
            torch.randint(0, 3, (8,), generator=generator),
            rank == 0 or bool(number % 2),
        )
        for number in range(STEPS)
    ]


def saved_and_loaded(state: Any) -> Any:
    """What a file holds of it, read without pickle's own classes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def of_first(state: Any) -> Any:
    told = [saved_and_loaded(state)]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def trained(model: Net, name: str) -> list[nn.Parameter]:
    """What the optimizer holds: all, or a head whose other layers nobody froze."""
    return [*(model.last if name.endswith("of one layer") else model).parameters()]


def run(name: str, rank: int, *, stops: bool) -> dict[str, Any]:
    """Parameters, buffers and losses of a script, which may end in the middle and begin again from files."""
    parts = [slice(0, STOP), slice(STOP, STEPS)] if stops else [slice(0, STEPS)]
    saved: tuple[Any, ...] = ()
    losses = []
    for part in parts:
        torch.manual_seed(len(losses))  # a script that begins again makes another model at first
        model = Net()
        optimizer = torch.optim.AdamW(trained(model, name), 0.01)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        plan = rl.Plan(workers=2, threads=1, sync=CASES[name])
        with rl.TrainStep(model, loss_fn, optimizer, plan, device="cpu") as step:
            if saved:
                step.load_worker_state(saved[2])
            losses += [step(batch).item() for batch in batches(rank)[part]]
            own = saved_and_loaded(step.worker_state())
            saved = of_first(model.state_dict()), of_first(step.optimizer_state()), own
        ended = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return {**ended, "losses": torch.tensor(losses)}


def refused(rank: int) -> list[str]:
    """States of other steps, and one that comes late."""
    said = []

    def make(**sync: Any) -> rl.TrainStep:
        model = Net()
        plan = rl.Plan(workers=2, threads=1, sync=rl.Sync(**sync))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return rl.TrainStep(model, loss_fn, optimizer, plan, device="cpu")

    with make(compression="int8") as step:
        state = step.worker_state()
        step(batches(rank)[0])
        for given in (state, {**state, "rank": 7}, {**state, "workers": 3}):
            try:
                step.load_worker_state(given)
            except CheckpointError as error:
                said.append(str(error))
    with make() as step:
        try:
            step.load_worker_state(state)
        except CheckpointError as error:
            said.append(str(error))
    with make(every=3, options={"delay": 1}) as step:
        try:
            step.load_worker_state({**state, "compression": "none", "every": 3})
        except CheckpointError as error:
            said.append(str(error))
    with make(compression="int8") as step:
        other = {**state, "remembered": {"residual.old.weight": torch.zeros(2)}}
        short = {name: part for name, part in state.items() if name != "order"}
        for odd in (None, short, other, {**state, "order": ["old.bias"]}):
            try:
                step.load_worker_state(odd)  # type: ignore[arg-type]
            except CheckpointError as error:
                said.append(str(error))
    return said


def main() -> None:
    world = World.join(threads=1, device="cpu")
    found: dict[str, Any] = {}
    for name in CASES:
        whole, parts = (run(name, world.rank, stops=stops) for stops in (False, True))
        same = torch.tensor(all(torch.equal(whole[key], parts[key]) for key in whole)).int()
        dist.all_reduce(same)
        found[name] = int(same)
    found["refused"] = refused(world.rank)
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
