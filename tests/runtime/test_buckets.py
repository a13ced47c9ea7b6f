"""Flat buckets: every gradient in its place, laid out like its parameter, and flags that tell the rest."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ridgeline.plan import ALIGNMENT_BYTES
from ridgeline.runtime.sync.buckets.buckets import Bucket, is_at
from ridgeline.runtime.sync.buckets.flags import SharedFlags

shapes = st.lists(st.lists(st.integers(1, 5), max_size=4).map(tuple), min_size=1, max_size=6)


def parameters(sizes: list[tuple[int, ...]]) -> list[tuple[str, nn.Parameter]]:
    return [(str(i), nn.Parameter(torch.randn(size))) for i, size in enumerate(sizes)]


@given(shapes, st.data())
def test_gradients_land_in_places_of_their_own(
    sizes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """Stored in any order and one by one or all at once, each gradient is found in its view, scaled or not."""
    members = parameters(sizes)
    bucket = Bucket(0, members)
    wanted = [torch.randn_like(p) for _, p in members]
    for (_, parameter), gradient in zip(members, wanted, strict=True):
        parameter.grad = gradient.clone()
    scale = 1.0
    if data.draw(st.booleans()):
        scale = 0.5
        for position in data.draw(st.permutations(range(len(members)))):
            bucket.store(position, scale)
    else:
        bucket.arrived = [True] * len(members)
        bucket.store_all(())
    for (_, parameter), view, gradient in zip(members, bucket.views, wanted, strict=True):
        assert parameter.grad is not None
        assert is_at(parameter.grad, view)
        assert parameter.grad is not view, "a model that is converted exchanges its data"
        assert torch.equal(view, gradient * scale)
        assert view.storage_offset() * view.element_size() % ALIGNMENT_BYTES == 0
        assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("arrived", [[False, False], [True, False]])
def test_what_did_not_arrive_is_blank_and_flagged(arrived: list[bool]) -> None:
    """Missing gradients are zeros with flag 0, also when a whole bucket is missing."""
    members = parameters([(3,), (2, 2)])
    bucket = Bucket(0, members)
    bucket.flat.fill_(7.0)
    bucket.arrived = list(arrived)
    for (_, parameter), here in zip(members, arrived, strict=True):
        parameter.grad = torch.ones_like(parameter) if here else None
    missing = bucket.blank_missing()
    bucket.store_all(missing)
    assert missing == tuple(i for i, here in enumerate(arrived) if not here)
    assert bucket.flags.tolist() == [float(here) for here in arrived]
    for view, here in zip(bucket.views, arrived, strict=True):
        assert torch.equal(view, torch.full_like(view, float(here)))


def test_views_have_the_strides_of_their_parameters() -> None:
    """A channels_last weight has a channels_last gradient, as fused optimizers want it."""
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    bucket = Bucket(0, [("weight", weight)])
    assert bucket.views[0].stride() == weight.stride()
    gradient = torch.randn(4, 3, 2, 2)
    weight.grad = gradient.clone()
    bucket.store(0, 1.0)
    assert torch.equal(bucket.views[0], gradient)


def test_flags_behind_complex_gradients_are_shared_as_numbers() -> None:
    """Without a word of torch's on what is lost, which is nothing."""
    parameters = (nn.Parameter(torch.ones(3, dtype=torch.complex64)), nn.Parameter(torch.ones(2)))
    buckets = [Bucket(n, [(f"p{n}", p)]) for n, p in enumerate(parameters)]
    for bucket in buckets:
        bucket.behind.fill_(1)
    group: Any = None

    def doubled(flags: torch.Tensor, **_: Any) -> None:
        flags.mul_(2)

    with mock.patch("torch.distributed.all_reduce", doubled):
        shared = SharedFlags(buckets, group)
        shared.exchange(waits=False)
        shared.settle()
    for bucket in buckets:
        assert torch.equal(bucket.behind, torch.full_like(bucket.behind, 2))
