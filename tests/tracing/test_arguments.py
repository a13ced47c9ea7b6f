"""Arguments as text: the format to the letter, and enough to issue every op again."""

import json
from typing import Any

import pytest
import torch
from reference_models import (
    TiedLanguageModel,
    image_batch,
    image_loss,
    language_batch,
    language_loss,
    mlp,
    resnet,
    rows,
)
from torch import Tensor, nn, optim

import ridgeline as rl
from ridgeline.errors import WorkloadError
from ridgeline.tensors.operator_text import encode
from ridgeline.workload import Op, TensorSpec, Workload


def test_the_format() -> None:
    """Each kind of value is written as the module's documentation says."""
    first, second = torch.zeros(2), torch.zeros(3)
    tensors = [first, second]

    def index_of(tensor: Tensor) -> int:
        return next(index for index, known in enumerate(tensors) if known is tensor)

    args = (first, [second, None, first], (1, -2), True, "mean", 0.5, float("-inf"), 1 + 2j)
    kwargs = {
        "dtype": torch.float32,
        "device": torch.device("cuda", 3),
        "memory_format": torch.channels_last,
        "layout": torch.strided,
        "generator": torch.Generator(),
    }
    assert encode(args, kwargs, index_of) == (
        '{"args":[{"tensor":0},[{"tensor":1},null,{"tensor":0}],[1,-2],true,"mean",0.5,{"float":"-inf"},'
        '{"complex":[1.0,2.0]}],"kwargs":{"dtype":{"dtype":"float32"},"device":{"device":"cuda"},'
        '"memory_format":{"memory_format":"channels_last"},"layout":{"layout":"strided"},'
        '"generator":{"generator":null}}}'
    )


def test_what_cannot_be_written() -> None:
    """A value of another kind is refused with its type and operator."""
    with pytest.raises(WorkloadError) as caught:
        encode((object(),), {}, id, where="mine.op.default")
    assert str(caught.value) == (
        "wanted operator arguments of tensors, numbers, text, dtypes, devices, layouts and lists of "
        "them, got object in mine.op.default; trace a step without this operator"
    )


def decoded(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [decoded(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("dtype", "memory_format", "layout"):
        return getattr(torch, content)
    return {"float": float, "device": torch.device, "generator": lambda _: None}[kind](content)


def issue(op: Op) -> list[TensorSpec]:
    """Issue an op again on new tensors without data; the geometry of its results."""
    func: Any = torch.ops
    for part in op.name.split("."):
        func = getattr(func, part)
    tensors = [
        torch.empty_strided(
            spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device="meta"
        )
        for spec in op.inputs
    ]
    content = json.loads(op.arguments.replace('{"device":"cpu"}', '{"device":"meta"}'))
    args = decoded(content["args"], tensors)
    kwargs = {name: decoded(value, tensors) for name, value in content["kwargs"].items()}
    results = func(*args, **kwargs)
    leaves = results if isinstance(results, list | tuple) else [results]
    return [
        TensorSpec(
            shape=tuple(t.shape), stride=t.stride(), dtype=str(t.dtype).removeprefix("torch.")
        )
        for t in leaves
        if isinstance(t, Tensor)
    ]


def language() -> Workload:
    model = TiedLanguageModel()
    return rl.trace(
        model, language_loss, optim.AdamW(model.parameters(), foreach=True), language_batch()
    )


def images() -> Workload:
    model = nn.Sequential(resnet((1, 1), bottleneck=True, width=4, classes=10), nn.Dropout())
    return rl.trace(model, image_loss, optim.SGD(model.parameters(), 0.1, 0.9), image_batch(4, 32))


@pytest.mark.parametrize("make", [language, images])
def test_every_op_can_be_issued_again(make: Any) -> None:
    """From name, inputs and arguments alone every op runs, and gives the recorded results."""
    for op in make().ops:
        if op.name == "aten._local_scalar_dense.default":
            continue
        wanted = [(spec.shape, spec.stride, spec.dtype) for spec in op.outputs]
        assert [(spec.shape, spec.stride, spec.dtype) for spec in issue(op)] == wanted, op


def test_equal_work_has_equal_keys() -> None:
    """Ops of equal operator, geometry and arguments share a key; others do not."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 4))
    ops = rl.trace(model, image_loss, optim.SGD(model.parameters(), 0.1), rows).phase("forward")
    keys = [op.key for op in ops if op.name == "aten.addmm.default"]
    assert len(keys) == 4
    assert len(set(keys)) == 3  # the first one reads the batch and not an activation
    assert all(key.startswith("aten.addmm.default:") for key in keys)


def test_text_is_json() -> None:
    """Infinities and every other value of a real step parse as strict JSON."""
    model = mlp()
    workload = rl.trace(model, image_loss, optim.SGD(model.parameters(), 0.1), rows)
    for op in workload.ops:
        assert json.loads(op.arguments).keys() == {"args", "kwargs"}
