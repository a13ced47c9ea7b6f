"""`trace` as its user meets it: nothing is touched, every kind of batch works, errors say what to do."""

import copy
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from real_run import differences, profile_step
from reference_models import image_batch, image_loss, mlp, resnet, rows, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import ridgeline as rl
from ridgeline.errors import WorkloadError
from ridgeline.workload import Workload


def test_the_users_objects_are_untouched() -> None:
    """Parameters, gradients, buffers, state, hooks, modes and random states are as before."""
    model = nn.Sequential(
        resnet((1,), bottleneck=False, width=4, classes=10), nn.Dropout(), nn.Linear(10, 10)
    )
    model[2].eval()
    batch = image_batch(4, side=16)
    optimizer = sgd(model)
    for _ in range(2):  # leaves gradients and state
        image_loss(model, batch).backward()
        optimizer.step()

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        random.random()
        np.random.rand()
        torch.manual_seed(1234)
        return image_loss(m, b)

    before = snapshot(model, optimizer, batch)
    workload = rl.trace(model, loss_fn, optimizer, batch)
    assert len(workload.ops) > 100
    after = snapshot(model, optimizer, batch)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        assert same, key


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    found["numpy"] = str(np.random.get_state())
    for name, tensor in model.state_dict(keep_vars=True).items():
        found[name] = tensor.detach().clone()
        found[f"{name} identity"] = (id(tensor), tensor.data_ptr(), tensor._version)
        if tensor.grad is not None:
            found[f"{name} gradient"] = tensor.grad.clone()
            found[f"{name} gradient identity"] = id(tensor.grad)
        found[f"{name} hooks"] = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    for name, module in model.named_modules():
        found[f"{name} module"] = (module.training, len(module._forward_hooks), len(vars(module)))
        found[f"{name} pre-hooks"] = len(module._forward_pre_hooks)
    for index, (parameter, state) in enumerate(optimizer.state.items()):
        found[f"state {index}"] = (id(parameter), sorted(state))
        found[f"state {index} momentum"] = state["momentum_buffer"].clone()
    found["images"], found["labels"] = batch[0].clone(), batch[1].clone()
    found["attributes"] = sorted(vars(optimizer))
    return found


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


x, y = rows
BATCHES: dict[str, tuple[Any, Any]] = {
    "tuple": ((x, y), lambda b: (b[0], b[1])),
    "list": ([x, y], lambda b: (b[0], b[1])),
    "dict": ({"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "named tuple": (Pair(x, y), lambda b: (b.x, b.y)),
    "nested": ({"in": [x, (y,)], "id": "run 7"}, lambda b: (b["in"][0], b["in"][1][0])),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_of_any_structure(case: str) -> None:
    """Tuples, lists, dicts and nests of them give the same workload; other leaves pass through."""
    batch, pick = BATCHES[case]
    model = mlp()
    workload = rl.trace(model, lambda m, b: image_loss(m, pick(b)), sgd(model), batch)
    assert workload.samples == 8
    assert [spec.shape for spec in workload.batch] == [(8, 6), (8,)]
    assert {spec.role for spec in workload.batch} == {"batch"}
    assert workload.ops == rl.trace(model, image_loss, sgd(model), (x, y)).ops


def test_a_variant_is_the_step_under_autocast() -> None:
    """Its ops are those of a real step in that precision; the workload itself stays as it is without."""
    model = resnet((1,), bottleneck=False, width=4, classes=10)
    batch = image_batch(4, side=16)

    def under_autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return image_loss(model, batch)

    workload = rl.trace(model, image_loss, sgd(model), batch, precisions=("as-is", "bf16"))
    variant = workload.at("bf16")
    optimizer = sgd(model)
    for _ in range(2):
        events = profile_step(model, under_autocast, optimizer, batch)
    assert differences(events, variant.ops) == []
    assert {op.dtype for op in variant.ops if op.family == "convolution"} == {"bfloat16"}
    assert variant.bytes_moved < workload.bytes_moved
    assert variant.flops == workload.flops
    plain = rl.trace(model, image_loss, sgd(model), batch)
    assert workload.ops == plain.ops
    assert workload.at("as-is") is workload.at("tf32") is workload
    assert plain.at("bf16") is plain


def test_batch_norm_that_averages_over_all_batches() -> None:
    """It reads how many there were, which a trace cannot know and need not."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 10))
    workload = rl.trace(model, image_loss, sgd(model), rows)
    optimizer = sgd(model)
    for _ in range(2):
        events = profile_step(model, image_loss, optimizer, rows)
    assert differences(events, workload.ops) == []


def test_roles_of_tensors() -> None:
    """Operands are told apart: parameter, buffer, batch, activation, gradient, state."""
    model = resnet((1,), bottleneck=False, width=4, classes=10)
    workload = rl.trace(model, image_loss, sgd(model), image_batch(4, side=16))
    first = workload.ops[0]
    assert first.name == "aten.convolution.default"
    assert [spec.role for spec in first.inputs] == ["batch", "parameter"]
    assert [spec.role for spec in first.outputs] == ["activation"]
    norm = next(op for op in workload.ops if op.name == "aten.native_batch_norm.default")
    roles = [spec.role for spec in norm.inputs]
    assert roles == ["activation", "parameter", "parameter", "buffer", "buffer"]
    update = workload.phase("optimizer")[1]
    assert [spec.role for spec in update.inputs] == ["state", "gradient"]
    assert workload.buffer_bytes == sum(b.nbytes for b in model.buffers())


def test_training_mode_is_taken_as_it_is() -> None:
    """In training there is dropout; in evaluation there is none."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout())
    names = {op.name for op in rl.trace(model, image_loss, sgd(model), rows).ops}
    assert "aten.bernoulli_.float" in names
    model.eval()
    names = {op.name for op in rl.trace(model, image_loss, sgd(model), rows).ops}
    assert "aten.bernoulli_.float" not in names


def test_a_large_model_takes_no_memory() -> None:
    """A step that would need terabytes is traced."""
    model = mlp()
    batch = (torch.zeros(1).expand(1 << 34, 6), torch.zeros(1, dtype=torch.long).expand(1 << 34))
    workload = rl.trace(model, image_loss, sgd(model), batch)
    assert workload.peak_memory_bytes > 1 << 40


def test_compiled_models_and_no_grad_callers() -> None:
    """A compiled model is traced as its eager self, and the caller's no_grad does not matter."""
    model = mlp()
    plain = rl.trace(model, image_loss, sgd(model), rows)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        workload = rl.trace(compiled, image_loss, sgd(model), rows)
    assert [op.name for op in workload.ops] == [op.name for op in plain.ops]


def test_saved_and_loaded(tmp_path: Any) -> None:
    """A workload survives its file."""
    workload = rl.trace(*step(), name="mlp")
    assert Workload.load(workload.save(tmp_path / "workload.json")) == workload
    assert workload.name == "mlp"


def test_hooks_on_parameters_are_noted() -> None:
    """A hook on a parameter is not run, and a note says so."""
    model = mlp()
    calls: list[Tensor] = []
    model[0].weight.register_hook(calls.append)
    workload = rl.trace(model, image_loss, sgd(model), rows)
    assert workload.notes == ("hooks on parameters are not traced: 0.weight",)
    assert calls == []


def step(model: nn.Module | None = None) -> tuple[Any, ...]:
    model = model or mlp()
    return model, image_loss, sgd(model), rows


def read_the_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = image_loss(model, batch)
    if loss.item() > 3:
        return loss * 2
    return loss


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x[:, 0] > 0])


def message_of(*arguments: Any) -> str:
    with pytest.raises(WorkloadError) as caught:
        rl.trace(*arguments)
    return str(caught.value)


WAY_OUT = "; or trace with may_run=True, which records a real step and takes back what it did"


def test_loss_must_be_a_scalar() -> None:
    """An unreduced loss is refused with its shape and a way to reduce it."""
    model, _, optimizer, batch = step()

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1], reduction="none")

    assert message_of(model, loss_fn, optimizer, batch) == (
        "wanted a scalar loss tensor, got shape (8,) from loss_fn; reduce it, for example with .mean()"
    )
    assert message_of(model, lambda m, b: 0.5, optimizer, batch) == (
        "wanted a scalar loss tensor, got float from loss_fn; return the loss tensor itself"
    )


def test_loss_must_require_grad() -> None:
    """A loss that nothing leads back from is refused."""
    model, _, optimizer, batch = step()
    assert message_of(model, lambda m, b: image_loss(m, b).detach(), optimizer, batch) == (
        "wanted a loss that depends on the parameters, got one without gradient from loss_fn; remove "
        "no_grad or detach, and leave at least one parameter trainable"
    )


def test_values_must_not_decide() -> None:
    """Reading a value names the operator, the place and the way out."""
    model, _, optimizer, batch = step()
    line = read_the_loss.__code__.co_firstlineno + 2
    assert message_of(model, read_the_loss, optimizer, batch) == (
        "wanted a step that does not look at the values of tensors, got aten._local_scalar_dense.default "
        f"(.item(), .tolist(), bool() or an if on a tensor) in loss_fn (test_capture.py:{line}) during "
        f"forward; keep such values as tensors, and read them after the step{WAY_OUT}"
    )


def test_shapes_must_not_depend_on_values() -> None:
    """Selecting by a mask names the operator, the module and the way out."""
    model = Selecting()
    line = Selecting.forward.__code__.co_firstlineno + 1
    assert message_of(model, image_loss, sgd(model), rows) == (
        "wanted a step whose shapes do not depend on the values of tensors, got aten.nonzero.default in "
        f"loss_fn (test_capture.py:{line}) during forward; use an operator of fixed output shape, for "
        f"example torch.where{WAY_OUT}"
    )


def test_loss_must_use_the_model_it_is_given() -> None:
    """A loss that reaches for another model is stopped before that model gets a fake gradient."""
    model, _, optimizer, batch = step()
    other = copy.deepcopy(model)
    assert message_of(model, lambda m, b: image_loss(other, b), optimizer, batch) == (
        "wanted a step that trains only the model it is given, got a tensor of shape (5, 6) that requires "
        "grad and is not in that model, in aten.t.default; use the model that is passed to loss_fn, make a "
        "trained loss its submodule, and freeze another network (a GAN's) with requires_grad_(False) while "
        "this step is called"
    )
    assert all(parameter.grad is None for parameter in other.parameters())


class Keeping(nn.Module):
    """Keeps its layer in a function, which a copy of the module shares with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer = nn.Linear(6, 5)
        self.apply_layer = lambda x: 2.0 * layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_layer(x)


def test_a_parameter_reached_past_the_model_is_named() -> None:
    """By the script's own name for the model, or by a function that keeps a module: it is no foreign tensor."""
    model, rows = nn.Sequential(nn.Linear(6, 5)), torch.randn(4, 6)
    keeping = Keeping()
    for found, loss, name in (
        (model, lambda m, b: model(b).mean(), "0.weight"),
        (keeping, lambda m, b: m(b).mean(), "layer.weight"),
    ):
        assert message_of(found, loss, sgd(found), rows) == (
            "wanted a step that finds its parameters in the model that is passed to loss_fn, got "
            f"'{name}' in aten.t.default by another way, where no copy of the model has its own; use "
            "loss_fn's argument instead of the script's name for the model, and methods instead of "
            "functions that keep a module (a lambda in __init__)"
        )
        assert all(parameter.grad is None for parameter in found.parameters())


def test_another_network_may_be_frozen_for_a_step() -> None:
    """As the message says: a GAN's other network computes and passes gradients on, and gets none."""
    model, other = nn.Linear(6, 5), nn.Linear(5, 1)
    trained = nn.ModuleList([model])
    other.requires_grad_(False)
    workload = rl.trace(
        trained, lambda m, b: other(m[0](b)).mean(), sgd(trained), torch.randn(4, 6)
    )
    assert [parameter.name for parameter in workload.gradients] == ["0.bias", "0.weight"]
    assert len([op for op in workload.phase("forward") if op.name == "aten.addmm.default"]) == 2
    assert all(parameter.grad is None for parameter in other.parameters())


def test_an_object_that_holds_tensors_is_a_batch() -> None:
    """As a library's graph: the operators are those of its tensors, and it stays as it was."""

    class Graph:
        def __init__(self) -> None:
            self.x, self.y = torch.randn(4, 2), torch.zeros(4, 3)

    def loss_fn(model: nn.Module, graph: Graph) -> torch.Tensor:
        graph.x = graph.x / 2.0
        return nn.functional.mse_loss(model(graph.x), graph.y)

    model, graph = nn.Linear(2, 3), Graph()
    x, values = graph.x, graph.x.clone()
    workload = rl.trace(model, loss_fn, sgd(model), graph)
    assert "aten.addmm.default" in {op.name for op in workload.phase("forward")}
    assert graph.x is x
    assert torch.equal(x, values)


def test_models_optimizers_and_batches_must_fit() -> None:
    """What cannot be a step is refused before anything is traced."""
    model, loss_fn, optimizer, batch = step()
    assert message_of(nn.ReLU(), loss_fn, optimizer, batch) == (
        "wanted a model with parameters, got none in ReLU; register what is trained as nn.Parameter"
    )
    assert message_of(model, loss_fn, optimizer, {"x": 3}) == (
        "wanted a batch of nested tuples, lists, dicts or objects with at least one tensor that has "
        "dimensions, got dict with none; pass what a data loader yields"
    )
    assert message_of(model, loss_fn, sgd(nn.Linear(2, 3)), batch) == (
        "wanted an optimizer over parameters of the model, got 2 others, the first of shape (3, 2); make "
        "what owns them a submodule of the model"
    )
    with torch.device("meta"):
        absent = mlp()
    assert message_of(absent, loss_fn, sgd(absent), batch) == (
        "wanted parameters on cpu or cuda, got 0.weight on meta; move the model"
    )
    lazy = nn.Sequential(nn.LazyLinear(4))
    assert message_of(lazy, loss_fn, optimizer, batch) == (
        "wanted parameters with shapes, got 0.weight of a lazy module that has none yet; call the model "
        "once on a batch before tracing"
    )


def test_models_that_cannot_be_copied() -> None:
    """A model that holds what cannot be copied is named with the reason."""
    model = mlp()
    model.source = (number for number in range(3))
    assert message_of(*step(model)) == (
        "wanted a model and an optimizer that copy.deepcopy can copy, got cannot pickle 'generator' object "
        "in Sequential or SGD; keep open files, locks, processes and loaders outside of them"
    )


def test_errors_of_the_step_pass_through() -> None:
    """A mistake of the user's own step is reported as torch reports it."""
    model, loss_fn, optimizer, (_, labels) = step()
    with pytest.raises(RuntimeError, match=r"reduction dim|mat1 and mat2") as caught:
        rl.trace(model, loss_fn, optimizer, (torch.zeros(8, 7), labels))
    assert not isinstance(caught.value, WorkloadError)
