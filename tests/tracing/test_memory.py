"""Live memory, against sums done by hand."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_models import image_loss, mlp, rows, sgd
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.tracing.memory import memory_points
from ridgeline.tracing.storages import NEVER, Lifetime, Storages
from ridgeline.workload import MemoryPoint, Workload

PARAMETERS = 4 * (6 * 5 + 5 + 5 * 4 + 4)
BATCH = 4 * 8 * 6 + 8 * 8
HIDDEN, LOGITS, SCALAR = 4 * 8 * 5, 4 * 8 * 4, 4


def after(workload: Workload, name: str, nth: int = 0) -> MemoryPoint:
    """Memory right after the nth op of a name."""
    found = [index for index, op in enumerate(workload.ops) if op.name == name]
    return workload.memory[found[nth]]


def test_an_mlp_by_hand() -> None:
    """Every category of an MLP's step is what a pencil says, at its beginning, peak and end."""
    model = mlp()
    workload = rl.trace(model, image_loss, sgd(model), rows)
    assert [point.op for point in workload.memory] == list(range(len(workload.ops)))
    assert {point.parameter_bytes for point in workload.memory} == {PARAMETERS}
    assert {point.state_bytes for point in workload.memory} == {PARAMETERS}  # momentum
    # The pre-activation lives until its rectified copy stands.
    relu = after(workload, "aten.relu.default")
    assert (relu.gradient_bytes, relu.activation_bytes) == (0, BATCH + 2 * HIDDEN)
    # Logits and their log-softmax, loss and its total weight.
    loss = after(workload, "aten.nll_loss_forward.default")
    assert loss.activation_bytes == BATCH + HIDDEN + 2 * LOGITS + 2 * SCALAR
    # Log-softmax, its gradient, the logits' gradient, the loss and the gradient it starts from.
    seed = after(workload, "aten._log_softmax_backward_data.default")
    assert seed.activation_bytes == BATCH + HIDDEN + 3 * LOGITS + 2 * SCALAR
    # The peak: the last layer's gradients stand; the rectifier's output and two gradients of it.
    peak = after(workload, "aten.threshold_backward.default")
    assert peak.gradient_bytes == 4 * (5 * 4 + 4)
    assert peak.activation_bytes == BATCH + 3 * HIDDEN + 2 * SCALAR
    assert peak.total_bytes == 2 * PARAMETERS + peak.gradient_bytes + peak.activation_bytes
    assert workload.peak_memory_bytes == peak.total_bytes
    end = workload.memory[-1]
    assert (end.gradient_bytes, end.activation_bytes) == (PARAMETERS, BATCH + SCALAR)


def test_recomputation_keeps_less() -> None:
    """A checkpointed stack holds fewer activations when forward ends, and more operators."""

    class Stack(nn.Module):
        def __init__(self, *, recompute: bool) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
            )
            self.recompute = recompute

        def forward(self, x: Tensor) -> Tensor:
            if self.recompute:
                return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)
            return self.layers(x)

    kept, less = (trace(Stack(recompute=recompute)) for recompute in (False, True))
    at_loss = [after(workload, "aten.nll_loss_forward.default") for workload in (kept, less)]
    saved = at_loss[0].activation_bytes - at_loss[1].activation_bytes
    assert saved == 3 * 4 * 8 * 6  # results of tanh; the fourth is the logits, alive in both
    assert less.flops > kept.flops


def trace(model: nn.Module, batch: Any = rows) -> Workload:
    return rl.trace(model, image_loss, sgd(model), batch)


def test_buffers_count_with_the_model() -> None:
    """Running statistics are part of the model's memory."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))
    workload = trace(model)
    tensors = (*model.parameters(), *model.buffers())
    assert workload.memory[0].parameter_bytes == sum(tensor.nbytes for tensor in tensors)
    assert workload.buffer_bytes == 6 * 4 * 2 + 8


lifetimes = st.builds(
    lambda role, num_bytes, birth, length: Lifetime(role, num_bytes, birth, birth + length),
    st.sampled_from(["parameter", "buffer", "gradient", "state", "activation", "batch"]),
    st.integers(0, 100),
    st.integers(-1, 12),
    st.one_of(st.integers(0, 12), st.just(NEVER)),
)


@given(alive=st.lists(lifetimes, max_size=20), num_ops=st.integers(0, 10))
def test_points_add_up_what_is_alive(alive: list[Lifetime], num_ops: int) -> None:
    """The bytes at an op are those of the storages born by then and not yet dead."""
    points = memory_points(alive, num_ops)
    assert [point.total_bytes for point in points] == [
        sum(entry.num_bytes for entry in alive if max(entry.birth, 0) <= op < entry.death)
        for op in range(num_ops)
    ]


def test_a_storage_is_numbered_once() -> None:
    """Views share their base's number; a freed storage's number is not used again."""
    storages = Storages()
    storages.now = 3
    base = torch.zeros(4, 4)
    assert storages.number(base) == storages.number(base.t()) == storages.number(base[1]) == 0
    storages.now = 5
    del base
    assert storages.lifetimes[0] == Lifetime(role="activation", num_bytes=64, birth=3, death=6)
    assert storages.number(torch.zeros(4, 4)) == 1
    assert storages.number(torch.zeros(3).to_sparse()) == -1
    assert storages.role(-1) == "activation"
