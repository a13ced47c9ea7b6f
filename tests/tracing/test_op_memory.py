"""Where the tensors of an op are: which share memory, and which are the host's in a step on a GPU."""

import torch
from reference_models import image_loss, mlp, rows
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode

import ridgeline as rl
from ridgeline.tracing.described import _op
from ridgeline.tracing.recorder import StepRecorder
from ridgeline.tracing.subject import itself
from ridgeline.workload import Op


def storages_of(op: Op) -> list[int]:
    return [storage for storage, _ in op.memory[: len(op.inputs)]]


def test_states_of_equal_shape_are_told_apart() -> None:
    """Both moments of Adam look alike; by their memory they are two, and the same in every op."""
    workload = traced_adam()
    first = {storages_of(op)[0] for op in workload.phase("optimizer") if ".lerp_." in op.name}
    second = {storages_of(op)[0] for op in workload.phase("optimizer") if ".addcmul_." in op.name}
    squares = {storages_of(op)[0] for op in workload.phase("optimizer") if ".sqrt." in op.name}
    assert len(first) == len(second) == 4
    assert not first & second
    assert squares == second


def test_views_share_the_memory_of_what_they_show() -> None:
    """The output of a view has its input's storage; that of a product has one of its own."""
    workload = traced_adam()
    for op in workload.ops:
        assert len(op.memory) == len(op.inputs) + len(op.outputs)
        made = {storage for storage, _ in op.memory[len(op.inputs) :]}
        if op.family == "view":
            assert made <= set(storages_of(op))
        elif op.name == "aten.mm.default":
            assert not made & set(storages_of(op))


def test_parts_of_one_tensor_are_told_apart_by_their_offset() -> None:
    """Three equal parts of one product begin at different elements of one storage."""
    model = nn.Linear(4, 6)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        a, b, c = model(batch).split(2, dim=1)
        return (a * b * c).sum()

    workload = rl.trace(model, loss_fn, optim.SGD(model.parameters(), 0.1), torch.ones(3, 4))
    (split,) = (op for op in workload.ops if op.name == "aten.split.Tensor")
    assert split.memory == tuple((split.memory[0][0], offset) for offset in (0, 0, 2, 4))


def test_tensors_of_the_host_are_marked_in_a_step_on_a_gpu() -> None:
    """A counter on the CPU is the host's there; in a step on the CPU nothing is."""
    model = mlp()
    recorder = StepRecorder(itself(model, optim.SGD(model.parameters(), 0.1), rows))
    with FakeTensorMode(), recorder:
        torch.empty(3, device="cuda").relu()
        torch.zeros(()).add_(1)
    on_gpu = {r.name: _op(r, (), recorder.storages, "cuda") for r in recorder.records}
    on_cpu = [_op(record, (), recorder.storages, "cpu") for record in recorder.records]
    assert on_gpu["aten.add_.Tensor"].runs_on_host
    assert on_gpu["aten.zeros.default"].runs_on_host
    assert not on_gpu["aten.relu.default"].runs_on_host
    assert not any(op.runs_on_host for op in on_cpu)


def traced_adam() -> rl.Workload:
    model = mlp()
    return rl.trace(model, image_loss, optim.Adam(model.parameters()), rows)
