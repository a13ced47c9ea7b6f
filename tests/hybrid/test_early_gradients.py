"""Gradients of compiled programs that tell when they are ready: which do, in what order, and never wrongly."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import reset
from torch._inductor.custom_graph_pass import CustomGraphPass

from ridgeline.capture import ready
from ridgeline.programs import inductor
from ridgeline.programs.beside import gradients
from ridgeline.programs.beside.gradients import announce, put_beside
from ridgeline.programs.beside.operators import ANNOUNCE, HAND_OUT, JOIN, PRODUCT


class Announcing(CustomGraphPass):
    """The pass for several workers, on CPU graphs; counts what it did."""

    def __init__(self) -> None:
        self.moved = self.announced = 0
        self.handed: list[fx.Node] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.moved += put_beside(graph, ("cpu",), converts=True)
        self.announced += announce(graph, ("cpu",))
        self.handed += graph.find_nodes(op="call_function", target=HAND_OUT)

    def uuid(self) -> None:
        """Never cached."""


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    """Each test begins and ends with nothing noted."""
    reset()
    ready.watch()
    yield
    ready.unwatch()


def told(call: Callable[..., Tensor], model: nn.Module, x: Tensor) -> dict[str, int | None]:
    """For every parameter, in which place its gradient told that it was ready."""
    found: dict[str, int | None] = {}

    def look(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            one = ready.look_up(parameter.grad)
            found[name] = None if one is None else one.number

        return hook

    hooks = [p.register_post_accumulate_grad_hook(look(n)) for n, p in model.named_parameters()]
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = call(model, x)
    loss.backward()
    for hook in hooks:
        hook.remove()
    return found


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


def images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(512, 8),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def small_images() -> nn.Sequential:
    """Three weights whose gradients are converted, and what compiles in half of the time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False), nn.Flatten(), nn.Linear(512, 8)
    ).to(memory_format=torch.channels_last)  # fmt: skip


def compiled(found: CustomGraphPass) -> Callable[..., Tensor]:
    options = {**inductor.replayed_options(announces=True), "post_grad_custom_post_pass": found}
    return torch.compile(loss_fn, dynamic=False, options=options)


def test_results_made_beside_tell_in_the_dtype_in_which_they_leave() -> None:
    """In half precision they are converted where they are made, to the same bits as in the plain program."""
    found, model, x = Announcing(), images(), torch.randn(2, 4, 12, 12)
    told(torch.compile(loss_fn, **inductor.plain_arguments()), model, x)
    want = [parameter.grad for parameter in model.parameters()]
    reset()
    places = told(compiled(found), model, x)
    assert found.moved == 3
    assert found.announced == 0
    assert len(found.handed) == 1
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    weights = {"0.weight", "3.weight", "6.weight"}
    assert {name for name, place in places.items() if place is not None} == weights
    assert places["6.weight"] < places["3.weight"] < places["0.weight"]  # type: ignore[operator]


@pytest.mark.parametrize(("size", "groups"), [(1 << 20, [3]), (5000, [1, 2]), (1, [1, 1, 1])])
def test_conversions_are_made_together(
    monkeypatch: pytest.MonkeyPatch, size: int, groups: list[int]
) -> None:
    """As many as fill a launch, in the order in which they are ready; the last ones whatever their size."""
    monkeypatch.setattr(gradients, "HANDED_BYTES", size)
    found, model, x = Announcing(), small_images(), torch.randn(2, 4, 12, 12)
    places = told(compiled(found), model, x)
    assert [len(node.args[0]) for node in found.handed] == groups
    assert places["3.weight"] < places["1.weight"] < places["0.weight"]  # type: ignore[operator]


def test_what_is_handed_out_is_joined() -> None:
    """Whoever reads it comes after the join, and what it was made from is kept until then."""
    found, model, x = Announcing(), small_images(), torch.randn(2, 4, 12, 12)
    told(compiled(found), model, x)
    (handed,) = found.handed
    (join,) = handed.graph.find_nodes(op="call_function", target=JOIN)
    order = {node: index for index, node in enumerate(handed.graph.nodes)}
    joined = set(join.args[0])
    assert {*handed.args[0], *handed.users} <= joined
    assert order[handed] < order[join]
    for result in handed.users:
        assert all(order[reader] >= order[join] for reader in result.users)


def test_dtypes_are_not_mixed() -> None:
    """Results that leave in two dtypes are handed out apart."""
    graph = fx.Graph()
    x, convert = graph.placeholder("x"), torch.ops.prims.convert_element_type.default
    products = [graph.call_function(torch.ops.aten.mm.default, (x, x)) for _ in range(3)]
    dtypes = (torch.float32, torch.float64, torch.float64)
    ends = [
        graph.call_function(convert, (product, dtype))
        for product, dtype in zip(products, dtypes, strict=True)
    ]
    graph.output(tuple(ends))
    for node in (x, *products):
        node.meta["val"] = torch.empty(4, 4, dtype=torch.bfloat16)
    for node, dtype in zip(ends, dtypes, strict=True):
        node.meta["val"] = torch.empty(4, 4, dtype=dtype)
    assert put_beside(graph, ("cpu",), converts=True) == 3
    handed = graph.find_nodes(op="call_function", target=HAND_OUT)
    assert [(len(node.args[0]), node.args[1]) for node in handed] == [
        (1, torch.float32),
        (2, torch.float64),
    ]
    assert len(graph.find_nodes(op="call_function", target=PRODUCT)) == 3


@pytest.mark.parametrize("flops", [gradients.BESIDE_FLOPS, -1.0])
def test_results_are_put_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, flops: float
) -> None:
    """Those that are converted, beside the chain or in it, to the same bits, by the program that is known."""
    monkeypatch.setattr(gradients, "BESIDE_FLOPS", flops)
    monkeypatch.setattr(gradients, "LEAST_ANNOUNCED_BYTES", 1024)
    found, model, x = Announcing(), small_images(), torch.randn(2, 4, 12, 12)
    call = compiled(found)
    told(call, model, x)
    want = {name: p.grad for name, p in model.named_parameters()}
    results = list(ready._results.values())
    assert len(results) == 3
    places: dict[tuple[int, int], Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        one = ready.look_up(parameter.grad)
        if one is not None:
            places[one.number, one.program] = torch.zeros_like(parameter)
            assert one.program != 0
            assert name.endswith("weight")
    ready.watch(places)
    told(call, model, x)
    taken = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
    assert {place.data_ptr() for place in places.values()} <= taken
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], rtol=0, atol=0)
    ready.watch(places)
    told(call, model, torch.randn(3, 4, 12, 12))  # compiled for its shape: another program
    taken = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
    assert not {place.data_ptr() for place in places.values()} & taken


def test_large_results_of_the_chain_tell_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are worth it, where they are computed, not at the end of the program."""
    monkeypatch.setattr(gradients, "BESIDE_FLOPS", -1)
    monkeypatch.setattr(gradients, "LEAST_ANNOUNCED_BYTES", 1024)
    found, model, x = Announcing(), small_images(), torch.randn(2, 4, 12, 12)
    places = told(compiled(found), model, x)
    assert found.moved == 0
    assert found.announced == 3
    large = {name for name, p in model.named_parameters() if p.numel() * 4 >= 1024}
    assert {name for name, place in places.items() if place is not None} == large
    assert places["3.weight"] < places["1.weight"] < places["0.weight"]  # type: ignore[operator]


def test_a_forward_graph_announces_nothing() -> None:
    """What it returns stays with this worker."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mm.default, (x, x)),))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(1024, 1024)
    assert announce(graph, ("cpu",)) == 0
    assert all(node.target is not ANNOUNCE for node in graph.nodes)


class Noting(torch.autograd.Function):
    """`factor * x` with a gradient that tells."""

    @staticmethod
    def forward(ctx: object, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]
        return x * factor

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        result = gradient * ctx.factor  # type: ignore[attr-defined]
        ready.note(result)
        return result, None


def test_what_was_changed_afterwards_does_not_tell() -> None:
    """A second use, a micro-batch before, a hook that scales: the event is older than the gradient."""
    use = Noting.apply
    x = nn.Parameter(torch.ones(4))
    use(x, 2.0).sum().backward()
    assert x.grad is not None
    assert ready.look_up(x.grad) is not None
    use(x, 2.0).sum().backward()
    assert ready.look_up(x.grad) is None, "a micro-batch before"
    x.grad = None
    (use(x, 2.0) + use(x, 3.0)).sum().backward()
    assert ready.look_up(x.grad) is None, "used twice"
    x.grad = None
    x.register_hook(lambda gradient: gradient.mul_(2))
    use(x, 2.0).sum().backward()
    assert ready.look_up(x.grad) is None, "scaled"


def test_memory_that_comes_again_does_not_tell() -> None:
    """A result that is gone leaves its address to others."""
    for _ in range(100):
        gone = torch.ones(1024)
        address = gone.data_ptr()
        ready.note(gone)
        del gone
        other = torch.ones(1024)
        if other.data_ptr() == address:
            break
    assert other.data_ptr() == address
    assert ready.look_up(other) is None


def test_nothing_is_noted_while_nobody_watches() -> None:
    """And what was noted is forgotten."""
    first, second = torch.ones(4), torch.ones(4)
    ready.note(first)
    ready.unwatch()
    ready.note(second)
    assert ready.look_up(first) is None
    assert ready.look_up(second) is None
