"""Four workers over gloo that exchange sparse gradients, by cases that come as lines of JSON.

torchrun --nproc-per-node 4 sparse_worker.py
"""

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ridgeline.errors import RidgelineError
from ridgeline.runtime.layout.same_state import is_same_model
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.sync.sparse.sparse_exchange import SparseExchange
from ridgeline.runtime.sync.transports.all_reduce import AllReduce
from ridgeline.state.snapshot import Snapshot
from ridgeline.workers.world import World

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from sparse_setups import MODELS, STEPS, batch_of, by_one, loss_of, optimizer_of, plan_of
from stopped_runs import resumed

from answering import serve

ROWS = 6


def drawn(rank: int, case: dict[str, Any]) -> list[Tensor | None]:
    """The gradient of each parameter on a worker: `rows`, one of `none`, no rows (`empty`), or `dense`."""
    generator = torch.Generator().manual_seed(1000 * case["seed"] + rank)
    found: list[Tensor | None] = []
    for place, (kind, width) in enumerate(zip(case["kinds"][rank], case["widths"], strict=True)):
        dtype = getattr(torch, case["dtypes"][place])
        shape = (ROWS, *width)
        count = 0 if kind == "empty" else int(torch.randint(1, 9, (), generator=generator))
        ids = torch.randint(0, ROWS, (count,), generator=generator)  # some come twice
        values = torch.randint(-8, 9, (count, *width), generator=generator).to(dtype)
        dense = torch.randint(-8, 9, shape, generator=generator).to(dtype)
        rows = torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=True)
        found.append({"none": None, "dense": dense}.get(kind, rows))
    return found


def law(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """The means of what the workers have, as lists; and how they lie in memory."""
    parameters = {
        str(n): nn.Parameter(
            torch.zeros(ROWS, *width, dtype=getattr(torch, dtype), device=world.device)
        )
        for n, (width, dtype) in enumerate(zip(case["widths"], case["dtypes"], strict=True))
    }
    for parameter, gradient in zip(parameters.values(), drawn(world.rank, case), strict=True):
        parameter.grad = None if gradient is None else gradient.to(world.device)
    exchange = SparseExchange(parameters, world, AllReduce(world, {}).mean)
    exchange.exchange()
    told = []
    for parameter in parameters.values():
        mean = parameter.grad
        if mean is None:
            told.append({"kind": "none"})
        elif mean.is_sparse:
            assert mean.is_coalesced()
            told.append(
                {
                    "kind": "rows",
                    "numbers": mean.indices()[0].tolist(),
                    "mean": mean.to_dense().double().tolist(),
                }
            )
        else:
            told.append({"kind": "dense", "mean": mean.double().tolist()})
    return {"means": told, "sent_bytes": exchange.sent_bytes}


def check_means(case: dict[str, Any], told: list[dict[str, Any]], size: int) -> None:
    """What `law` tells is the mean of what so many workers drew, as rows where nobody has a dense gradient."""
    brought = [drawn(rank, case) for rank in range(size)]
    for place, found in enumerate(told):
        own = [gradients[place] for gradients in brought]
        kinds = {kinds[place] for kinds in case["kinds"]}
        wanted = "dense" if "dense" in kinds else "none" if kinds == {"none"} else "rows"
        assert found["kind"] == wanted
        if wanted == "none":
            continue
        dense = [g.to_dense().double() if g is not None else torch.zeros(()) for g in own]
        mean = torch.tensor(found["mean"], dtype=torch.float64)
        # Small whole numbers add up exactly, and only a third is no binary fraction.
        eps = torch.finfo(getattr(torch, case["dtypes"][place])).eps
        room = 64 * eps if size == 3 else 0.0
        assert float((mean - sum(dense) / size).abs().max()) <= room
        if wanted == "rows":
            touched = [g.coalesce().indices()[0].tolist() for g in own if g is not None]
            assert found["numbers"] == sorted({number for ids in touched for number in ids})


def stepping(
    world: World, model: nn.Module, optimizer: Optimizer, case: dict[str, Any]
) -> PlannedStep:
    return PlannedStep(
        model,
        loss_of(case, world.rank, world.size),
        optimizer,
        plan_of(world.size, case),
        device=world.kind,
        clip_norm=case.get("clip"),
        process_group=world.process_group,
    )


def fresh(world: World, case: dict[str, Any]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = MODELS[case["model"]]().to(world.device)
    return model, optimizer_of(model, case)


def run(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What a training leaves, and what its step shows."""
    model, optimizer = fresh(world, case)
    begin = [p.detach().clone() for p in model.parameters()]
    # Another beginning on each worker: the first one's is taken.
    torch.manual_seed(world.rank)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (world.rank > 0))
    with stepping(world, model, optimizer, case) as step:
        synchronizer: Any = step.synchronizer
        sent = [0]
        for number in range(STEPS):
            step(batch_of(world.rank, number, is_distinct=case.get("is_distinct", False)))
            sent.append(getattr(synchronizer, "sent_bytes", 0))
        frames = [(span.name, span.lane) for span in step.timeline().frames]
        kinds = ["none" if p.grad is None else str(p.grad.layout) for p in model.parameters()]
        return {
            "parameters": [p.detach().clone() for p in model.parameters()],
            "state": step.optimizer_state()["state"],
            "told": {
                "frames": frames,
                "same": is_same_model(model, world, "data"),
                "moved": gap(begin, model),
                "kinds": kinds,
                "notes": [*step.notes],
                "buckets": [list(bucket.names) for bucket in getattr(synchronizer, "buckets", ())],
                "sent_bytes": sent[-1] - sent[-2],
            },
        }


def trained(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A training beside DistributedDataParallel, and beside the same by one process."""
    ours = run(world, case)
    told = ours["told"]
    if case.get("has_ddp", True):
        theirs, optimizer = by_ddp(world, case)
        told["ddp"] = same(ours["parameters"], [p.detach() for p in theirs.parameters()])
        told["ddp state"] = same(ours["state"], optimizer.state_dict()["state"])
        told["ddp gap"] = gap(ours["parameters"], theirs)
    if case.get("has_one", True):
        told["gap"] = gap(ours["parameters"], by_one(case, world.size)[0])
    return told


def by_ddp(world: World, case: dict[str, Any]) -> tuple[nn.Module, Optimizer]:
    """The same steps as its tutorial writes them; clipping by hand, which torch refuses for sparse gradients."""
    model, optimizer = fresh(world, case)
    ddp = DistributedDataParallel(model, process_group=world.process_group)
    loss_fn = loss_of(case, world.rank, world.size)
    parts = case.get("knobs", {}).get("accumulate", 1)
    for number in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(world.rank, number)
        bounds = [len(batch[0]) * i // parts for i in range(parts + 1)]
        for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
            with ddp.no_sync() if index < parts - 1 else nullcontext():
                loss = loss_fn(ddp, tuple(leaf[begin:end] for leaf in batch))
                (loss * ((end - begin) / len(batch[0]))).backward()
        if "clip" in case:
            clip_by_hand(model, case["clip"])
        optimizer.step()
    return model, optimizer


def clip_by_hand(model: nn.Module, most: float) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    dense = [g.coalesce().to_dense() if g.is_sparse else g for g in gradients]
    norm = nn.utils.get_total_norm(dense)
    for gradient in gradients:
        gradient.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))


def gap(ours: list[Tensor], theirs: nn.Module) -> float:
    pairs = zip(ours, theirs.parameters(), strict=True)
    return max(float((a.cpu() - b.detach().cpu()).abs().max()) for a, b in pairs)


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same bits."""
    if isinstance(one, Tensor):
        dense = [t.to_dense() if t.is_sparse else t for t in (one, other)]
        return torch.equal(*dense)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def put_back(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Whether steps that a snapshot takes back are repeated to the bit, before the first step and later."""
    model, optimizer = fresh(world, case)
    with stepping(world, model, optimizer, case) as step:
        found = {}
        for name in ("first", "later"):
            snapshot = Snapshot(model, optimizer, None, step.synchronizer)
            ends = []
            for _ in range(2):
                for number in range(4):
                    step(batch_of(world.rank, number))
                ends.append([p.detach().clone() for p in model.parameters()])
                ends[-1] += [*states(optimizer)]
                if len(ends) < 2:
                    snapshot.restore()
            found[name] = same(*ends)
    return found


def states(optimizer: Optimizer) -> list[Tensor]:
    return [
        value.clone()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def written(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What is said where one worker alone writes a row of a table between two steps."""
    model, optimizer = fresh(world, case)
    with stepping(world, model, optimizer, case) as step:
        try:
            for number in range(4):
                step(batch_of(world.rank, number))
                if number == 1 and world.rank == 1:
                    with torch.no_grad():
                        model.get_parameter("words.weight")[3] += 1.0
        except RidgelineError as error:
            return {"message": str(error)}
    return {"message": ""}


def refused(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What making the step says, or its first call."""
    try:
        model, optimizer = fresh(world, case)
        if case.get("differs") and world.rank:
            model.get_submodule("words").sparse = False
        if case.get("is_late"):
            model.get_submodule("words").sparse = False
        with stepping(world, model, optimizer, case) as step:
            if case.get("is_late"):
                model.get_submodule("words").sparse = True
            step(batch_of(world.rank, 0))
    except RidgelineError as error:
        return {"message": f"{type(error).__name__}: {error}"}
    return {"message": ""}


def stopped(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Whether a run that was stopped ends with the bits of one that was not."""

    class Numbers(nn.Module):
        """Takes the task's random numbers for numbers of rows."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = MODELS[case["model"]]()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner((x.abs() * 10).long().clamp(max=29))

    found = resumed(
        world,
        Path(case["folder"]),
        plan_of(world.size, case),
        Numbers,
        lambda model: optimizer_of(model, case),
        stops=(4,),
        checkpoint_every=2,
    )
    return found[4]


KINDS: dict[str, Callable[[World, dict[str, Any]], dict[str, Any]]] = {
    "law": law,
    "trained": trained,
    "put back": put_back,
    "written": written,
    "refused": refused,
    "stopped": stopped,
}


if __name__ == "__main__":
    serve(lambda world, case: KINDS[case["kind"]](world, case))
