"""Taking back what a step did: every place that its code can name, and tensors that were left without data."""

import abc
import collections
import contextlib
import functools
import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from reference_models import image_loss, mlp, rows, sgd
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ridgeline as rl
from ridgeline.reach.sparse import parts
from ridgeline.reach.undo import Undo, undone
from ridgeline.tensors.batch import signature

COUNTS: collections.Counter[str] = collections.Counter()
TOTAL = 0


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Shared:
    calls = 0
    cache: dict[str, int] = {}

    @property
    def twice(self) -> int:
        COUNTS["twice"] += 1
        return 2


def places() -> tuple[Any, Any]:
    """A function that changes whatever it can, and a function that shows it."""
    number = 0
    seen: list[int] = []
    nested = {"deep": ({"names": {1}},)}
    slotted, shared = Slotted(), Shared()
    plain = types.SimpleNamespace(queue=collections.deque([1], maxlen=3))
    mean, array, fresh = torch.zeros(2), np.zeros(2), nn.Linear(2, 2)
    grown = torch.zeros(2, 2)
    generators = (torch.Generator(), random.Random(0), np.random.default_rng(0))

    def change(step: int = 1, *, kept: dict[str, int] = {"k": 1}) -> None:  # noqa: B006
        global TOTAL  # noqa: PLW0603 - such is what people write
        nonlocal number
        number += step
        TOTAL += 1
        COUNTS["calls"] += 1
        kept["k"] += 1
        change.calls = number  # type: ignore[attr-defined]
        seen.append(number)
        nested["deep"][0]["names"].add(2)
        nested["new"] = ()
        slotted.value = shared.own = shared.twice
        Shared.calls += 1
        shared.cache["x"] = 1
        plain.queue.extend((2, 3, 4))
        mean.add_(1)
        array[:] = 5
        fresh.weight.data.fill_(3)
        fresh.weight.grad = torch.ones(2, 2)
        fresh.bias.requires_grad_(False)
        fresh.register_buffer("late", torch.ones(1))
        grown.data = torch.ones(3)
        torch.rand(1, generator=generators[0])
        generators[1].random()
        generators[2].random()

    def show() -> Any:
        return repr(
            (
                number, TOTAL, dict(COUNTS), change.__kwdefaults__, vars(change), seen, nested,
                slotted.value, vars(shared), Shared.calls, Shared.cache, plain.queue, mean, array,
                fresh.weight, fresh.weight.grad, fresh.bias, [*fresh.state_dict()], grown,
                generators[0].get_state().sum(), generators[1].getstate(),
                generators[2].bit_generator.state,
            )
        )  # fmt: skip

    return change, show


def test_every_place_is_put_back() -> None:
    """Variables, attributes, containers, tensors, arrays and generators that the code can reach."""
    change, show = places()
    before = show()
    with undone(change):
        change()
        assert show() != before
    assert show() == before
    with pytest.raises(TypeError, match="unsupported operand"), undone(change):
        change("one")
    assert show() == before


def test_what_did_not_change_is_not_touched() -> None:
    """Identities stay, also of tensors that a graph holds: backward through them is still allowed."""
    model = mlp()
    held = model(rows[0]).sum()
    weight = model[0].weight
    with undone(model):
        model[0].weight.data.add_(1)
        model[0].extra = 1
    assert model[0].weight is weight
    assert not hasattr(model[0], "extra")
    held.backward()


@functools.cache
def endless(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


@functools.lru_cache(maxsize=2)
def bounded(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


class Weighting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = torch.linspace(0, 1, 4)
        return x * self.weight


HIDDEN: dict[str, Any] = {}


def hidden(size: int) -> Tensor:
    kept = globals()["HID" + "DEN"]  # a name that no code shows
    if size not in kept:
        kept[size] = torch.linspace(0, 1, size)
    return kept[size]


@pytest.mark.parametrize("kind", ["cache", "lru_cache", "attribute", "dict", "hidden"])
def test_no_tensor_without_data_is_left(kind: str) -> None:
    """Whatever keeps a tensor over steps has a real one afterwards, and a note says that it was so."""
    endless.cache_clear()
    bounded.cache_clear()
    HIDDEN.clear()
    weighting, kept = Weighting(), {}

    def keep(x: Tensor) -> Tensor:
        if "w" not in kept:
            kept["w"] = torch.linspace(0, 1, 4)
        return x * kept["w"]

    use = {
        "cache": lambda x: x * endless(4),
        "lru_cache": lambda x: x * bounded(4),
        "attribute": weighting,
        "dict": keep,
        "hidden": lambda x: x * hidden(4),
    }[kind]
    model = mlp()
    real = type(torch.zeros(1))

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return image_loss(lambda x: use(m(x)), b)

    workload = rl.trace(model, loss_fn, sgd(model), rows)
    assert workload.notes[-1] == (
        "the step keeps tensors that it makes outside of the model (a cache that is filled once), so that "
        "what was traced is its first call"
    )
    assert type(loss_fn(model, rows)) is real
    recorded = rl.trace(model, loss_fn, sgd(model), rows, may_run=True)
    assert "aten.linspace.default" in {op.name for op in workload.ops}
    assert "aten.linspace.default" not in {op.name for op in recorded.ops}
    assert type(loss_fn(model, rows)) is real


def test_real_tensors_are_not_written_without_running() -> None:
    """An operator that has no fake tensor really runs, and what it wrote is taken back."""
    teacher, norm = nn.Linear(6, 10).requires_grad_(False), nn.BatchNorm1d(10, affine=False)
    count, history = torch.zeros(()), [torch.zeros(3), torch.zeros(3)]

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        count.add_(1)
        torch._foreach_add_(history, 1.0)
        teacher.weight.mul_(0.5)
        return (norm(m(b[0])) - norm(teacher(b[0]))).square().mean()

    before = [t.clone() for t in (*teacher.parameters(), *norm.buffers(), count, *history)]
    model = nn.Linear(6, 10)
    for may_run in (False, True):
        workload = rl.trace(model, loss_fn, sgd(model), rows, may_run=may_run)
        assert workload.notes == ()
        now = [*teacher.parameters(), *norm.buffers(), count, *history]
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_what_was_computed_is_spared_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    """Whoever asks for the gradient of a tensor that is no leaf is warned by torch."""
    weight = torch.ones(2, requires_grad=True)
    Undo([weight], spared=[weight * 2, weight]).restore()
    assert not recwarn.list


@pytest.mark.parametrize("is_fake", [False, True])
def test_tensors_get_their_own_memory_back(is_fake: bool) -> None:
    """After `.data = ...`, in a trace too: what shares the memory sees the same tensor as before."""
    layer = nn.Linear(2, 2)
    shared, before = layer.weight.data, layer.weight.detach().clone()
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext()
    with undone(layer), mode:
        layer.weight.data = layer.weight.data * 2
        layer.bias.data = layer.bias.data[:1].double()
    assert layer.weight.data_ptr() == shared.data_ptr()
    assert torch.equal(layer.weight, before)
    assert (layer.bias.dtype, layer.bias.shape) == (torch.float32, (2,))
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize(("layout", "replaces"), [("coo", False), ("coo", True), ("csr", False)])
def test_a_sparse_tensor_is_put_back_where_it_was(layout: str, replaces: bool) -> None:
    """Its elements are, in the same memory, which a captured graph may read; other indices are, too."""
    dense = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    sparse = dense.to_sparse().coalesce() if layout == "coo" else dense.to_sparse_csr()
    before, places = Undo([sparse]), [part.data_ptr() for part in parts(sparse)]
    if replaces:
        sparse.copy_(torch.eye(2).to_sparse())
    else:
        sparse.values().mul_(2.0)
    assert not torch.equal(sparse.to_dense(), dense)
    before.restore()
    assert torch.equal(sparse.to_dense(), dense)
    assert [part.data_ptr() for part in parts(sparse)] == places


def test_an_ordered_dictionary_gets_its_entries_back_in_order() -> None:
    """As a cache that forgets what was used long ago: its own order is not that of its memory."""
    cache = collections.OrderedDict(a=1, b=2)
    cache.move_to_end("a")
    with undone(cache):
        cache["c"] = 3
    assert [*cache.items()] == [("b", 2), ("a", 1)]


def test_containers_whose_classes_refuse_to_be_walked_are_looked_into() -> None:
    """By what their own kind says: a tuple without a length, a list that shows other elements."""

    class Irreps(tuple[Any, ...]):
        def __len__(self) -> int:
            raise NotImplementedError

    class Hidden(list[Any]):
        def __iter__(self) -> Any:
            return iter(())

    tensor, hidden = torch.ones(2), torch.ones(2)
    with undone(Irreps([tensor]), Hidden([hidden])) as undo:
        assert undo.has(tensor)
        tensor.zero_()
        hidden.zero_()
    assert torch.equal(tensor, torch.ones(2))
    assert torch.equal(hidden, torch.ones(2))


def test_objects_of_classes_that_are_called_pythons_own_are_looked_into() -> None:
    """As batches of torch-geometric are, whose class is made by a metaclass in the module `abc`."""

    class Graph(abc.ABC):  # noqa: B024 - as theirs
        def __init__(self) -> None:
            self.x = torch.ones(2)

    kind = abc.ABCMeta("Batch", (Graph,), {"__module__": "abc"})
    batch = kind()
    x = batch.x
    with undone(batch) as undo:
        assert undo.has(x)
        batch.x = x / 2.0
        x.zero_()
    assert batch.x is x
    assert torch.equal(x, torch.ones(2))
    assert repr(signature(batch)[1]) == "(<tensors in a Batch>,)"
