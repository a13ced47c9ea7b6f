"""Weight gradients beside the chain: the same results, everything joined before it is read, nothing freed early."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import reset
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode

from ridgeline.programs import inductor
from ridgeline.programs.beside import gradients
from ridgeline.programs.beside.gradients import put_beside
from ridgeline.programs.beside.operators import CONV_WEIGHT_GRADIENT, JOIN, PRODUCT

CONV_BACKWARD = torch.ops.aten.convolution_backward.default


class Watched(CustomGraphPass):
    """The pass on CPU graphs; keeps the graphs that it changed."""

    def __init__(self) -> None:
        self.changed: list[fx.Graph] = []

    def __call__(self, graph: fx.Graph) -> None:
        if put_beside(graph, ("cpu",)):
            self.changed.append(graph)

    def uuid(self) -> None:
        """Never cached."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    reset()
    found = Watched()
    monkeypatch.setattr(
        inductor,
        "replayed_options",
        lambda **_: {**inductor.plain_options(), "post_grad_custom_post_pass": found},
    )
    return found


def images() -> nn.Sequential:
    """Convolutions whose backward has the forms that occur: plain, strided, grouped, the first one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2, bias=False), nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 3, bias=False), nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4),
    )  # fmt: skip


def tied() -> nn.Module:
    """One weight used twice: its gradients are added before anybody sees them."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.a, self.b, self.a, self.c, self.a):
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(0)
    return Tied()


def gradients_of(call: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    call(model, x).backward()
    return [parameter.grad for parameter in model.parameters()]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def check_joined(graph: fx.Graph) -> None:
    """Whoever reads a result made beside, or reads what may be freed, comes after its join."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    joins = [node for node in graph.nodes if node.target is JOIN]
    made = [n for n in graph.nodes if n.target in (CONV_WEIGHT_GRADIENT, PRODUCT)]
    for node in made:
        join = next(j for j in joins if node in j.args[0])
        assert order[node] < order[join]
        assert all(order[user] >= order[join] for user in node.users)
        kept: Any = join.args[1]
        assert set(node.all_input_nodes) <= set(kept)


@pytest.mark.parametrize(
    ("make", "shape", "least"), [(images, (2, 4, 12, 12), 5), (tied, (3, 8), 2)]
)
def test_gradients_are_those_of_the_plain_program(
    watched: Watched, make: Callable[[], nn.Module], shape: tuple[int, ...], least: int
) -> None:
    """Parted, replaced, sunk below the join: bit for bit what the compiler's own graph gives."""
    model = make()
    x = torch.randn(*shape)
    model(x)
    plain = torch.compile(loss, **inductor.plain_arguments())
    want = gradients_of(plain, model, x)
    notes: list[str] = []
    got = gradients_of(torch.compile(loss, **inductor.replayed_arguments(notes)), model, x)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert notes == []
    (graph,) = watched.changed
    check_joined(graph)
    made = [n for n in graph.nodes if n.target in (CONV_WEIGHT_GRADIENT, PRODUCT)]
    assert len(made) >= least
    for node in graph.nodes:
        if node.target is CONV_BACKWARD:
            assert not node.args[10][1], "the chain computes no weight gradient"


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_have_the_layout_that_the_graph_promised(dtype: torch.dtype, kernel: int) -> None:
    """Whatever the library writes: else the compiler copies a result, which it does before the join."""
    x, weight = torch.randn(2, 4, 7, 7, dtype=dtype), torch.randn(8, 4, kernel, kernel, dtype=dtype)
    gradient = torch.nn.functional.conv2d(x, weight).mul(0.1)
    settings = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    want = CONV_BACKWARD(gradient, x, weight, None, *settings, [False, True, False])[1]
    for layout in (torch.contiguous_format, torch.channels_last):
        for promised in (weight, weight.contiguous(memory_format=torch.channels_last)):
            args = gradient, x.contiguous(memory_format=layout), weight, *settings
            got = CONV_WEIGHT_GRADIENT(*args, promised.stride(), 0)
            assert got.stride() == promised.stride()
            torch.testing.assert_close(got, want)
            with FakeTensorMode() as mode:
                fake = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
                got = CONV_WEIGHT_GRADIENT(*fake, promised.stride(), 0)
            assert got.stride() == promised.stride()
            assert (got.shape, got.dtype) == (weight.shape, dtype)


def test_large_operators_stay_in_the_chain(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fill the device alone: by their work, or by their memory."""
    x = torch.randn(3, 8)
    for name in ("BESIDE_FLOPS", "BESIDE_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(gradients, name, 1)
            reset()
            gradients_of(torch.compile(loss, **inductor.replayed_arguments([])), tied(), x)
    assert watched.changed == []


def test_memory_that_waits_to_be_freed_is_bounded(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound there is a join in between."""
    monkeypatch.setattr(gradients, "MOST_KEPT_BYTES", 0)
    model, x = tied(), torch.randn(3, 8)
    want = gradients_of(loss, model, x)
    got = gradients_of(torch.compile(loss, **inductor.replayed_arguments([])), model, x)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    (graph,) = watched.changed
    check_joined(graph)
    made = [n for n in graph.nodes if n.target in (CONV_WEIGHT_GRADIENT, PRODUCT)]
    assert len([n for n in graph.nodes if n.target is JOIN]) == len(made) > 1


def test_a_gradient_that_goes_on_is_not_moved() -> None:
    """A product that a later product reads belongs to the chain, whatever its name."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    mm = torch.ops.aten.mm.default
    first = graph.call_function(mm, (x, w))
    second = graph.call_function(mm, (first, w))
    third = graph.call_function(mm, (x, x))
    graph.output((second, third))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4)
    assert put_beside(graph, ("cpu",)) == 2
    assert first.target is mm
    check_joined(graph)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_where_the_options_fail_the_plain_ones_take_over(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Before anything has run (the norm counts one batch), and with a note."""
    reset()

    def broken(graph: fx.Graph) -> None:
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        if any("tangents" in name for name in names) == (part == "backward"):
            raise ArithmeticError("no room")

    monkeypatch.setattr(
        inductor,
        "replayed_options",
        lambda **_: {**inductor.plain_options(), "post_grad_custom_post_pass": broken},
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    notes: list[str] = []
    x = torch.randn(3, 8)
    got = gradients_of(torch.compile(loss, **inductor.replayed_arguments(notes)), model, x)
    assert int(model[1].num_batches_tracked) == 1
    want = gradients_of(loss, model, x)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    (note,) = notes
    assert note == (
        "compiled with plain options, since with those for replays it failed: InductorError: "
        "ArithmeticError: no room"
    )
