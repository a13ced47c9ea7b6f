"""Sizes among results stay sizes, in every form of a callable."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ridgeline as rl
from adversary.interpreting import interpreted
from ridgeline.tensors.nests import builder, map_tensors

pytestmark = pytest.mark.usefixtures("compiled_in_this_process")


class Pair(NamedTuple):
    """Of any two."""

    first: Any
    second: Any


SIZES = st.lists(st.integers(0, 5), max_size=3).map(torch.Size)
NESTS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(SIZES, st.integers(), st.none(), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner),
        st.dictionaries(st.sampled_from("abc"), inner).map(OrderedDict),
    ),
    max_leaves=8,
)


def _kinds(nest: Any) -> Any:
    """The same with the type of everything in it."""
    if isinstance(nest, dict):
        return type(nest), [(key, _kinds(value)) for key, value in nest.items()]
    if isinstance(nest, (list, tuple)):
        return type(nest), [*map(_kinds, nest)]
    return type(nest), nest


@given(NESTS)
def test_a_nest_is_built_again_as_it_was(nest: Any) -> None:
    """With the type of everything in it, also where sizes are inside."""
    leaves, tree = pytree.tree_flatten(nest)
    assert _kinds(builder(tree)(leaves)) == _kinds(nest)
    assert _kinds(map_tensors(torch.clone, nest)) == _kinds(nest)


def test_tensors_are_changed() -> None:
    """And nothing else."""
    x = torch.ones(2, 3)
    changed, size = map_tensors(torch.neg, (x, x.shape))
    assert changed.eq(-1).all()
    assert type(size) is torch.Size


class Net(nn.Module):
    """Tells the size of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        """Of a linear layer."""
        y = self.linear(x)
        return y, y.shape


@pytest.mark.parametrize("mode", ["compiled", "packaged"])
@interpreted()
def test_calls_give_sizes(mode: Any) -> None:
    """As the module does."""
    call = rl.hybridize(Net(), torch.randn(2, 3), mode=mode)
    assert type(call(torch.randn(2, 3))[1]) is torch.Size


def test_parallel_calls_give_sizes() -> None:
    """As the function does."""
    with rl.parallelize(Net(), torch.randn(2, 3), mode="serial") as call:
        assert type(call(torch.randn(2, 3))[1]) is torch.Size
