"""Steps with sparse gradients are traced with the rows that they have, down to what the optimizer does."""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline as rl

ROWS, WIDTH = 6, 4


class Shapes(TorchDispatchMode):
    """Counts the operators of what runs under it, with the shapes of their dense arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "aten" and "detach" not in str(func):
            self.seen[str(func), dense_shapes(args)] += 1
        return func(*args, **(kwargs or {}))


def dense_shapes(args: Iterable[object]) -> tuple[tuple[int, ...], ...]:
    tensors = [a for a in args if isinstance(a, Tensor)]
    return tuple(tuple(t.shape) for t in tensors if t.layout is torch.strided)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("make", [Adagrad, SparseAdam, SGD])
def test_an_optimizer_is_traced_on_the_rows_of_a_gradient(
    make: Callable[..., Optimizer],
) -> None:
    """As many operators of each kind and size as a real step has, where no index stands twice."""
    model = nn.Embedding(20, WIDTH, sparse=True)
    optimizer, batch = make(model.parameters(), lr=0.1), torch.arange(ROWS)
    traced = rl.trace(model, loss_fn, optimizer, batch)
    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    with Shapes() as real:
        optimizer.step()
    found: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
    for op in traced.ops:
        if op.phase == "optimizer":
            shapes = [tuple(spec.shape) for spec in op.inputs if spec.stride or not spec.shape]
            found[op.name, tuple(shapes)] += 1
    rows = {(name, shapes) for name, shapes in real.seen if (ROWS, WIDTH) in shapes}
    assert {key: found[key] for key in rows} == {key: real.seen[key] for key in rows}
    assert not any(0 in shape for _, shapes in found for shape in shapes)
    assert sum(name == "aten._coalesce.default" for name, _ in found.elements()) == sum(
        name == "aten._coalesce.default" for name, _ in real.seen.elements()
    )
