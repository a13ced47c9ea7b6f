"""Constant masks of attention in compiled programs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from ridgeline.programs import inductor
from ridgeline.programs.masks import use_causal_attention

pytestmark = pytest.mark.usefixtures("compiler_begins_anew")

N = 6
attention = functional.scaled_dot_product_attention


def compared() -> Tensor:
    """As transformers write it."""
    place = torch.arange(N, device="cpu")
    return (place[None, None, None, :] <= place[None, None, :, None]).expand(2, -1, -1, -1)


def added(lowest: float = -math.inf) -> Tensor:
    """As `nn.Transformer` writes it."""
    return torch.triu(torch.full((N, N), lowest), diagonal=1)


def drawn() -> Tensor:
    return torch.rand(N, N) < 2


def changed() -> Tensor:
    mask = torch.ones(N, N, dtype=torch.bool)
    mask.tril_()
    return mask


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "compared": compared,
    "lower half": lambda: torch.ones(N, N, dtype=torch.bool).tril(),
    "not the upper half": lambda: ~torch.ones(N, N, dtype=torch.bool).triu(1),
    "added": added,
    "added, lowest": lambda: added(torch.finfo(torch.float32).min),
    "to": lambda: torch.tril(torch.ones(N, N)).to("cpu").bool(),
}
NEEDLESS: dict[str, Callable[[], Tensor]] = {
    "all": lambda: torch.ones(N, N, dtype=torch.bool),
    "zeros": lambda: torch.zeros(2, 1, N, N),
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "strictly lower": lambda: (
        torch.ones(N, N, dtype=torch.bool).tril(-1) | torch.eye(N).bool().triu(9)
    ),
    "a band": lambda: torch.ones(N, N, dtype=torch.bool).tril().triu(-2),
    "one sees less": lambda: compared() & (torch.arange(2) == 0)[:, None, None, None],
    "a slope": lambda: added() + torch.arange(N) * 0.1,
    "not low enough": lambda: added(-1e4),
    "drawn": drawn,
    "changed in place": changed,
}


def looked_at(run: Callable[..., Any], *inputs: Tensor, **options: Any) -> list[tuple[Any, Any]]:
    """What attention is given in the graph of a program: mask and causality."""
    found: list[tuple[Any, Any]] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        use_causal_attention(graph)
        nodes = graph.graph.find_nodes(op="call_function", target=attention)
        found.extend((node.kwargs.get("attn_mask"), node.kwargs.get("is_causal")) for node in nodes)
        return graph.forward

    got = torch.compile(run, backend=backend, **options)(*inputs)
    torch.testing.assert_close(got, run(*inputs))
    return found


def query(generator: int = 0) -> Tensor:
    return torch.randn(2, 3, N, 4, generator=torch.Generator().manual_seed(generator))


def with_mask(make: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: attention(x, x * 2, x + 1, attn_mask=make(), scale=0.3)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_told(name: str) -> None:
    """And the results are those with the mask."""
    assert looked_at(with_mask(CAUSAL[name]), query()) == [(None, True)]


@pytest.mark.parametrize("name", NEEDLESS)
def test_a_mask_that_hides_nothing_goes(name: str) -> None:
    assert looked_at(with_mask(NEEDLESS[name]), query()) == [(None, False)]


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    """Also those that only look causal before somebody writes to them, or by chance."""
    [(mask, is_causal)] = looked_at(with_mask(OTHERS[name]), query())
    assert isinstance(mask, fx.Node)
    assert not is_causal


def test_masks_that_are_given_stay() -> None:
    """They may be others next time."""
    [(mask, _)] = looked_at(lambda x, m: attention(x, x, x, attn_mask=m), query(), compared())
    assert isinstance(mask, fx.Node)


def test_masks_of_unknown_sizes_stay() -> None:
    def run(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[2])
        return attention(x, x, x, attn_mask=place[None] <= place[:, None])

    [(mask, _)] = looked_at(run, query(), dynamic=True)
    assert isinstance(mask, fx.Node)


def test_keys_of_the_past_keep_their_mask() -> None:
    """Causal is what begins at the first key, and these see all but the last."""

    def run(x: Tensor) -> Tensor:
        place = torch.arange(N)
        return attention(x[:, :, 2:], x, x, attn_mask=place <= place[2:, None])

    [(mask, _)] = looked_at(run, query())
    assert isinstance(mask, fx.Node)


def test_causal_is_of_as_many_queries_as_keys() -> None:
    """What it means for others differs from kernel to kernel."""

    def run(x: Tensor) -> Tensor:
        return attention(x[:, :, 2:], x, x, attn_mask=torch.ones(N - 2, N).bool().tril())

    [(mask, _)] = looked_at(run, query())
    assert isinstance(mask, fx.Node)


def test_dropout_stays() -> None:
    """Also where it is told by its place."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    mask = graph.call_function(torch.ones, (N, N), {"dtype": torch.bool})
    mask.meta["example_value"] = torch.ones(N, N, dtype=torch.bool)
    node = graph.call_function(attention, (x, x, x, mask, 0.25))
    graph.output(node)
    use_causal_attention(fx.GraphModule({}, graph))
    assert not node.args
    assert [node.kwargs[name] for name in ("query", "key", "value")] == [x, x, x]
    assert node.kwargs["dropout_p"] == 0.25
    assert node.kwargs["attn_mask"] is None
    assert node.kwargs["is_causal"] is False


def test_places_of_arguments_do_not_matter() -> None:
    """Neither those of the mask nor of what comes behind it."""
    assert looked_at(lambda x: attention(x, x, x, compared(), 0.0, False), query()) == [
        (None, True)
    ]


def test_compiled_gradients_are_those_of_the_mask() -> None:
    """With the compiler."""

    def run(x: Tensor) -> Tensor:
        return with_mask(compared)(x).square().sum()

    def gradient(way: Callable[[Tensor], Tensor]) -> Tensor:
        x = query().requires_grad_()
        return torch.autograd.grad(way(x), x)[0]

    compiled = torch.compile(run, **inductor.plain_arguments())
    torch.testing.assert_close(gradient(compiled), gradient(run))
