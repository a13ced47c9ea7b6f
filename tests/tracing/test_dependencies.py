"""Dependencies: earlier ops only, the flow of data, and hazards of writing in place."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_models import (
    image_loss,
    mlp,
    rows,
    sgd,
)
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.tracing.dependencies import dependencies
from ridgeline.tracing.recorder import Record, Use
from ridgeline.workload import Workload


def ancestors(workload: Workload) -> list[set[int]]:
    """All ops that must come before each op, directly or not."""
    found: list[set[int]] = []
    for op in workload.ops:
        found.append(set(op.dependencies).union(*(found[index] for index in op.dependencies)))
    return found


def index_of(workload: Workload, name: str, module: str, phase: str = "forward") -> int:
    for index, op in enumerate(workload.ops):
        if (op.name, op.module, op.phase) == (name, module, phase):
            return index
    raise LookupError(name)


def test_data_flow_of_an_mlp() -> None:
    """Products wait for what they multiply, and for nothing else."""
    workload = trace(mlp())
    first, relu, second = (
        index_of(workload, "aten.addmm.default", "0"),
        index_of(workload, "aten.relu.default", "1"),
        index_of(workload, "aten.addmm.default", "2"),
    )
    before = ancestors(workload)
    assert {first, relu} <= before[second]
    # The gradients of the last layer's weight and bias do not wait for one another.
    products = [i for i, op in enumerate(workload.ops) if op.name == "aten.mm.default"]
    (bias, *_) = [i for i, op in enumerate(workload.ops) if op.name == "aten.sum.dim_IntList"]
    into_hidden, into_weight, _ = products
    assert bias not in before[into_weight]
    assert into_weight not in before[bias]
    assert into_hidden not in before[into_weight]
    assert relu in before[into_weight]


def trace(model: nn.Module, loss_fn: Any = image_loss, batch: Any = rows) -> Workload:
    return rl.trace(model, loss_fn, sgd(model), batch)


class Counting(nn.Module):
    """Reads a buffer, changes it in place, reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.count
        self.count.add_(1)
        return x * self.count


def test_writing_in_place_keeps_its_place() -> None:
    """A write comes after the reads before it, and before the reads after it."""
    workload = trace(Counting())
    read, write, again = (
        index_of(workload, name, "")
        for name in ("aten.add.Tensor", "aten.add_.Tensor", "aten.mul.Tensor")
    )
    before = ancestors(workload)
    assert read in before[write]
    assert write in before[again]


def test_optimizer_waits_for_its_gradient_only() -> None:
    """A parameter's update waits for its own gradient and the last use of the parameter."""
    workload = trace(mlp())
    updates = [
        i
        for i, op in enumerate(workload.ops)
        if op.phase == "optimizer" and "parameter" in {spec.role for spec in op.inputs}
    ]
    before = ancestors(workload)
    last_layer = workload.parameters[2].ready_op
    first_layer = workload.parameters[0].ready_op
    assert workload.parameters[2].name == "2.weight"
    made = max(i for i in before[last_layer] if workload.ops[i].name == "aten.mm.default")
    assert made in before[updates[2]]
    assert first_layer not in before[updates[2]]
    # The backward pass reads the weight, so its update comes after that.
    assert all(
        index_of(workload, "aten.mm.default", "2", "backward") in before[update]
        for update in updates[2:3]
    )


storages = st.integers(0, 5)


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Made-up ops: each reads some storages, writes some of them, and makes a new one."""
    made: list[Record] = []
    for number in range(draw(st.integers(1, 12))):
        reads = sorted(draw(st.sets(storages, max_size=3)))
        writes = sorted(draw(st.sets(st.sampled_from(reads), max_size=2))) if reads else []
        made.append(record(reads, writes, 6 + number))
    return made


def record(reads: list[int], writes: list[int], makes: int) -> Record:
    def use(storage: int) -> Use:
        return Use(shape=(1,), stride=(1,), offset=0, dtype="float32", storage=storage)

    return Record(
        name="aten.mul.Tensor",
        phase="forward",
        module="",
        family="elementwise",
        dtype="float32",
        inputs=tuple(use(storage) for storage in reads),
        outputs=(use(makes),),
        written=tuple(writes),
        is_view=False,
        arguments="{}",
        flops=0,
        bytes_read=0,
        bytes_written=0,
    )


@given(made=records(), chooser=st.randoms(use_true_random=False))
def test_any_order_that_keeps_the_edges_computes_the_same(made: list[Record], chooser: Any) -> None:
    """Ops run in any order that respects the edges leave every storage as eager order does."""
    edges = dependencies(made)
    assert all(dependency < index for index, before in enumerate(edges) for dependency in before)
    waiting = set(range(len(made)))
    order: list[int] = []
    while waiting:
        free = [index for index in sorted(waiting) if not waiting & set(edges[index])]
        order.append(chooser.choice(free))
        waiting.remove(order[-1])
    assert run(made, order) == run(made, range(len(made)))


def run(made: list[Record], order: Any) -> dict[int, Any]:
    """Contents of all storages after running ops in an order; an op's result hashes what it reads."""
    contents: dict[int, Any] = {storage: storage for storage in range(6)}
    for index in order:
        seen = (index, *(contents[use.storage] for use in made[index].inputs))
        for storage in (*made[index].written, made[index].outputs[0].storage):
            contents[storage] = (storage, seen)
    return contents
