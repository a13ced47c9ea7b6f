"""Parts of models that torch's compiler leaves as they were written, beside what it really translates."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from chained_workloads import make_chain
from ridgeline.plan import Plan
from ridgeline.simulator.compiler.compile_time import compile_seconds
from ridgeline.simulator.compiler.untranslated import untranslated
from ridgeline.simulator.step import simulate
from ridgeline.tracing.capture import trace
from ridgeline.workload import Workload
from strategies import make_machine


def with_op(name: str, *, module: str = "layers.0", phase: Any = "forward") -> Workload:
    """A chain, one of whose operators is another."""
    workload = make_chain(device="cuda")
    index = next(i for i, op in enumerate(workload.ops) if op.phase == phase)
    changed = msgspec.structs.replace(workload.ops[index], name=name, module=module)
    ops = (*workload.ops[:index], changed, *workload.ops[index + 1 :])
    return msgspec.structs.replace(workload, ops=ops)


@pytest.mark.parametrize(
    ("name", "module", "left"),
    [
        ("aten._cudnn_rnn.default", "gru", {"", "gru", "layers.0.linear", "layers.1.linear"}),
        ("aten._cudnn_rnn.default", "layers.0.gru", {"layers.0.gru", "layers.0.act"}),
        ("aten.nonzero.default", "layers.0", {"layers.0", "layers.0.act"}),
        ("aten._local_scalar_dense.default", "layers.0", {"layers.0", "layers.0.act"}),
        ("aten._local_scalar_dense.default", "", set()),  # in the loss, behind the model
        ("aten._thnn_fused_gru_cell.default", "cell", set()),
        ("aten.mul.Tensor", "layers.0", set()),
    ],
)
def test_what_stops_the_compiler(name: str, module: str, left: set[str]) -> None:
    workload = with_op(name, module=module)
    is_left = untranslated(workload)
    found = {op.module for op in workload.ops if is_left(op)}
    assert left <= found
    assert bool(left) == bool(found)
    if "" not in left:
        assert not any(path.startswith("layers.1") for path in found)


@pytest.mark.parametrize(("dtype", "is_left"), [("bool", True), ("uint8", True), ("int64", False)])
def test_a_mask_decides_how_many_there_are(dtype: str, is_left: bool) -> None:
    """As positions do not: those are as many as there are results."""
    workload = with_op("aten.index.Tensor", module="layers.0")
    (index,) = (i for i, op in enumerate(workload.ops) if op.name == "aten.index.Tensor")
    op = workload.ops[index]
    mask = msgspec.structs.replace(op.inputs[0], dtype=dtype)
    changed = msgspec.structs.replace(op, inputs=(op.inputs[0], mask))
    ops = (*workload.ops[:index], changed, *workload.ops[index + 1 :])
    masked = msgspec.structs.replace(workload, ops=ops)
    assert untranslated(masked)(changed) is is_left
    # The pieces around it are compiled, which takes as long as in one piece.
    assert compile_seconds(masked, "compiled") == pytest.approx(
        compile_seconds(workload, "compiled")
    )


def test_such_a_step_is_predicted_as_eager() -> None:
    machine = make_machine(device="cuda", dispatch_s=1e-6)
    workload = with_op("aten._cudnn_rnn.default", module="gru")
    fused = Plan(execution="eager", optimizer="fused")
    for plan, other in (
        (Plan(execution="compiled", optimizer="fused"), fused),
        (Plan(execution="compiled+graph"), Plan(execution="graph")),
    ):
        wanted = simulate(machine, workload, other).step_ns
        assert simulate(machine, workload, plan).step_ns == wanted
    chain = make_chain(device="cuda")
    compiled = simulate(machine, chain, Plan(execution="compiled+graph")).step_ns
    assert compiled < simulate(machine, chain, Plan(execution="graph")).step_ns


class Experts(nn.Module):
    """Rows go where their largest value says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.route = nn.Linear(6, 6), Route()

    def forward(self, x: Tensor) -> Tensor:
        return self.route(self.first(x).relu())


class Route(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            rows = (x.argmax(1) % 2 == index).nonzero().flatten()
            out = out.index_add(0, rows, layer(x[rows]))
        return out


class Spoken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(6, 6), nn.GELU())
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.before(x)[:, None])[0].flatten(1)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def translated(model: nn.Module, batch: Tensor) -> set[str]:
    """The parameters that are inputs of what the compiler makes of loss and model."""
    seen: set[int] = set()

    def backend(module: Any, inputs: list[Tensor]) -> Any:
        seen.update(map(id, inputs))
        return module.forward

    torch._dynamo.reset()
    torch.compile(loss_fn, backend=backend, dynamic=False)(model, batch)
    return {name for name, parameter in model.named_parameters() if id(parameter) in seen}


def test_the_compiler_really_leaves_a_loop_with_a_break() -> None:
    """The trace tells which parameters it takes and which it does not."""
    torch.manual_seed(0)
    model, batch = Experts(), torch.randn(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    workload = trace(model, loss_fn, optimizer, batch, may_run=True)
    is_left = untranslated(workload)
    left = {op.module for op in workload.ops if is_left(op)}
    wanted = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in left}
    assert translated(model, batch) == wanted == {"first.weight", "first.bias"}


def test_the_compiler_really_leaves_a_model_with_a_recurrent_layer() -> None:
    torch.manual_seed(0)
    assert translated(Spoken(), torch.randn(8, 6)) == set()
