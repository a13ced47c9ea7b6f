"""Four workers over gloo that use synchronous stores, by cases that come as lines of JSON.

torchrun --nproc-per-node 4 store_worker.py
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import RidgelineError
from ridgeline.runtime import kvstore
from ridgeline.runtime.kvstore.values import placement
from ridgeline.workers.world import World

sys.path.append(str(Path(__file__).parents[1]))

from answering import serve

STEPS = 6
ROWS, WIDTH = 12, 3


def values_of(rank: int, seed: int, shape: list[int], dtype: str) -> Tensor:
    """What the worker of that rank pushes."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.startswith("int"):
        return torch.randint(-50, 50, shape, generator=generator, dtype=getattr(torch, dtype))
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (normal * 8).to(getattr(torch, dtype))


def rows_of(rank: int, seed: int) -> Tensor:
    """Sparse rows that the worker of that rank pushes, one of them twice."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.randint(0, ROWS, (4,), generator=generator)
    ids = torch.cat([ids, ids[:1]])
    rows = torch.randn(5, WIDTH, generator=generator)
    return torch.sparse_coo_tensor(ids[None], rows, (ROWS, WIDTH), check_invariants=True)


def listed(tensor: Tensor) -> Any:
    return tensor.double().tolist()


def served(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What a store with servers makes of pushes: sums, rows, bits, state through a file, and versions."""
    rank, path = world.rank, case["path"]
    with kvstore.create(
        "dist_async", staleness=case["staleness"], servers=case["servers"]
    ) as store:
        assert (store.rank, store.num_workers, store.type) == (rank, world.size, "dist_async")
        value = values_of(0, 7, [ROWS, WIDTH], "float32")
        store.init(["w", "n", "e"], [value, torch.tensor(5.0), torch.empty(0)])
        begun = [listed(reading.get()) for reading in store.pull(["w", "n", "e"])]
        store.barrier()  # nobody pushes before all have read
        store.set_optimizer("sgd", lr=1.0, momentum=0.0)
        brought = torch.full((ROWS, WIDTH), float(rank + 1))
        for _ in range(3):
            store.push(["w", "n"], [brought, torch.tensor(float(rank + 1))])
        store.barrier()
        summed = [listed(reading.get()) for reading in store.pull(["w", "n"])]
        store.barrier()
        store.push("w", rows_of(rank, 0))
        store.barrier()
        some = listed(store.row_sparse_pull("w", row_ids=torch.tensor([ROWS - 1, 0])).get())
        found = listed(store.pull("w").get())
        assert some == [found[ROWS - 1], found[0]]
        store.set_gradient_compression({"type": "2bit", "threshold": 2.0})
        store.barrier()
        store.push("w", brought)
        store.barrier()
        coded = listed(store.pull("w").get())
        store.save_optimizer_states(path)
        store.barrier()
        store.load_optimizer_states(path)
    return {"begun": begun, "summed": summed, "found": found, "coded": coded}


def served_training(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Parameters after steps in which all wait for all."""
    torch.manual_seed(0)
    model = Net()
    names, parameters = zip(*model.named_parameters(), strict=True)
    keys = [*names]
    with kvstore.create("dist_async", staleness=0, servers=2) as store:
        store.broadcast(keys, [*parameters], [*parameters])
        store.set_optimizer("adamw", rescale_grad=1 / world.size, lr=0.01)
        for step in range(STEPS):
            store.pushpull(keys, gradients(model, world.rank, step), [*parameters])
    return {"parameters": [listed(parameter.detach()) for parameter in parameters]}


def opened(world: World) -> kvstore.KVStore:
    store = kvstore.create("dist_sync", process_group=world.process_group)
    assert (store.rank, store.num_workers, store.type) == (world.rank, world.size, "dist_sync")
    return store


def sums(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """First values, and those after a push: of keys of some shapes, in one call or one by one."""
    shapes, dtype = case["shapes"], case["dtype"]
    keys = [f"k{number}" for number in range(len(shapes))]
    values = [
        values_of(world.rank, case["seed"] + n, shape, dtype) for n, shape in enumerate(shapes)
    ]
    with opened(world) as store:
        store.init(keys, values)
        begun = [reading.get() for reading in store.pull(keys)]
        if case["at_once"]:
            store.push(keys, values)
        else:
            for key, value in zip(keys, values, strict=True):
                store.push(key, value)
        for value in values:
            value.zero_()  # a push has read it
        found = [reading.get() for reading in store.pull(keys)]
        assert all(value.dtype == getattr(torch, dtype) for value in found)
    return {"begun": [*map(listed, begun)], "found": [*map(listed, found)]}


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 17), nn.Linear(17, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def gradients(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Of the batch that the worker of that rank has in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    loss = nn.functional.cross_entropy(model(x), torch.randint(0, 3, (8,), generator=generator))
    return [*torch.autograd.grad(loss, [*model.parameters()])]


def trained(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Parameters after some steps of training, of which a checkpoint of the optimizer was taken halfway."""
    torch.manual_seed(0)
    model, path = Net(), case["path"]
    names, parameters = zip(*model.named_parameters(), strict=True)
    keys = [*names]
    store = opened(world)
    store.broadcast(keys, [*parameters], [*parameters])
    store.set_optimizer(case["optimizer"], rescale_grad=1 / world.size, **case["settings"])
    for step in range(STEPS):
        if step == STEPS // 2:
            store.save_optimizer_states(path)
            store.close()
            store = opened(world)
            store.init(keys, [*parameters])
            store.set_optimizer(case["optimizer"], rescale_grad=1 / world.size, **case["settings"])
            store.barrier()
            store.load_optimizer_states(path)
        store.pushpull(keys, gradients(model, world.rank, step), [*parameters])
    store.close()
    return {"parameters": [listed(parameter.detach()) for parameter in parameters]}


def sparse(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """An embedding after two pushes of sparse rows, and some rows of it, which one worker alone asks for."""
    value = values_of(0, 7, [ROWS, WIDTH], "float32")
    with opened(world) as store:
        store.init("words", value)
        if case["optimizer"]:
            store.set_optimizer(case["optimizer"], **case["settings"])
        for step in range(2):
            store.push("words", rows_of(world.rank, step))
        found = store.pull("words").get()
        if world.rank == 0:
            some = store.row_sparse_pull("words", row_ids=torch.tensor([3, 1, 3])).get()
            assert torch.equal(some, found[[3, 1, 3]])
    return {"found": listed(found)}


def compressed(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Values after pushes that are compressed, and what was sent in all of them."""
    shape, params = case["shape"], case["params"]
    with opened(world) as store:
        store.init("w", torch.full(shape, 0.3))
        assert torch.equal(store.pull("w").get(), torch.full(shape, 0.3)), "init was compressed"
        store.set_gradient_compression(params)
        found = []
        for step in range(STEPS):
            store.push("w", values_of(world.rank, step, shape, "float32") / 8)
            found.append(listed(store.pull("w").get()))
    return {"found": found}


def refused(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What a worker says whose last one initialises something else."""
    is_last = world.rank == world.size - 1
    shape = [3] if is_last and case["what"] == "shape" else [2]
    key = "v" if is_last and case["what"] == "key" else "w"
    with opened(world) as store:
        try:
            store.init(key, torch.zeros(shape))
        except RidgelineError as error:
            return {"message": f"{type(error).__name__}: {error}"}
    return {"message": ""}


def unlike(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What each worker says to a push of which its last one makes something else, and to a common one behind it."""
    what = case["what"] if world.rank == world.size - 1 else ""
    keys, value = [*"abcd"], torch.ones(4, 2)
    with opened(world) as store:
        store.init([*keys, "e"], [value] * 5)
        store.set_optimizer("sgd", lr=0.5 if what == "settings" else 0.25)
        order = keys[::-1] if what == "order" else keys
        store.push(order, [value.to_sparse(1) if what == "rows" else value] * 4)
        try:
            store.pull("a").get()
        except RidgelineError as error:
            told = f"{type(error.__cause__).__name__}: {error.__cause__}"
        store.set_optimizer("sgd", lr=1.0)
        store.push("e", value)
        return {"message": told, "found": listed(store.pull("e").get()[0, 0])}


def fail(key: Any, total: Tensor, value: Tensor) -> None:
    if total.flatten()[0] > 0:
        raise ValueError("no luck")
    value.copy_(total)


def failing(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What each worker says to a push whose update fails where it is served, and to the next one of it."""
    kvstore.register_updater("fail", fail)
    store = opened(world)
    store.init(["w", "v"], [torch.zeros(ROWS, WIDTH), torch.zeros(2)])
    key = "w"
    if case["what"] == "sparse":
        store.set_optimizer("adam", lr=0.1)
        store.push("w", rows_of(world.rank, 0))
    elif case["what"] == "whole numbers":
        key = "n"
        store.init("n", torch.zeros(2, dtype=torch.int64))
        store.set_optimizer("sgd", lr=0.1)
        store.push("n", torch.ones(2, dtype=torch.int64))
    else:
        store.set_updater("fail")
        store.push("w", torch.ones(ROWS, WIDTH))
    messages = []
    try:
        store.pull(key).get()
    except RidgelineError as error:
        messages.append(str(error.__cause__))
    store.push("v", torch.zeros(2))
    assert torch.equal(store.pull("v").get(), torch.zeros(2))
    store.close()
    return {"messages": messages}


KINDS = {
    "unlike": unlike,
    "failing": failing,
    "sums": sums,
    "trained": trained,
    "sparse": sparse,
    "compressed": compressed,
    "refused": refused,
    "served": served,
    "served_training": served_training,
}


def main() -> None:
    # Small enough that values of a test are divided.
    placement.LARGE_ELEMENTS = 30
    serve(lambda world, case: KINDS[case["kind"]](world, case))


if __name__ == "__main__":
    main()
