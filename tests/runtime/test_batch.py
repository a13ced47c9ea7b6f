"""Batches: any nest of tensors, split exactly."""

import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from ridgeline.errors import BatchError
from ridgeline.tensors import batch as batches


@given(st.integers(1, 40), st.integers(1, 40))
def test_shares_make_the_weighted_mean_the_whole_mean(samples: int, parts: int) -> None:
    """Splitting loses no sample, and shares times means of the parts sum to the mean of the whole."""
    values = torch.randn(samples, dtype=torch.float64)
    if parts > samples:
        with pytest.raises(BatchError, match=f"wanted at least accumulate={parts} samples"):
            batches.split({"x": values}, parts)
        return
    pieces = batches.split({"x": values, "constant": 3}, parts)
    assert torch.equal(torch.cat([piece["x"] for piece, _ in pieces]), values)
    assert all(piece["constant"] == 3 for piece, _ in pieces)
    mean = sum(share * piece["x"].mean() for piece, share in pieces)
    torch.testing.assert_close(mean, values.mean())


def test_samples_must_share_dimension_0() -> None:
    """Tensors with other leading sizes are refused by name of the sizes."""
    with pytest.raises(BatchError, match=r"share their leading dimension, got sizes \[4, 3\]"):
        batches.num_samples((torch.zeros(4), torch.zeros(3, 2)))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Tensors by name, and one inside of another object."""

    x: torch.Tensor
    rest: UserDict[str, torch.Tensor]
    rate: float = 0.5


class Graph:
    """Holds tensors of nodes and of edges."""

    def __init__(self) -> None:
        self.nodes, self.edges = torch.zeros(5, 2), torch.zeros(7, 2)


def test_objects_with_entries_are_divided_like_nests() -> None:
    """Each part is an object of the same class; the batch stays whole."""
    pair = Pair(torch.arange(5.0), UserDict(y=torch.arange(5) * 10))
    (first, _), (second, share) = batches.split((pair, numpy.arange(5)), 2)
    assert isinstance(first[0], Pair)
    assert isinstance(second[0].rest, UserDict)
    assert (first[0].x.tolist(), second[0].x.tolist()) == ([0.0, 1.0], [2.0, 3.0, 4.0])
    assert second[0].rest["y"].tolist() == [20, 30, 40]
    assert (second[1].tolist(), second[0].rate, share) == ([2, 3, 4], 0.5, 0.6)
    assert len(pair.x) == len(pair.rest["y"]) == 5


@pytest.mark.parametrize(
    "make", [Graph, lambda: pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])]
)
def test_objects_that_hold_tensors_otherwise_are_not_divided(make: Callable[[], object]) -> None:
    """Each part would have all of it beside its share of the labels."""
    held = make()
    name = type(held).__name__
    message = (
        f"wanted tensors to divide into accumulate=2 micro-batches, got a {name} that holds tensors itself, "
        "of which nobody knows which belong to a sample; put the tensors into the batch, or use "
        "accumulate=1 with smaller batches"
    )
    for batch in ((held, torch.zeros(5)), held):
        with pytest.raises(BatchError) as caught:
            batches.split(batch, 2)
        assert str(caught.value) == message
    assert batches.split(held, 1)[0][0] is held


@pytest.mark.parametrize(
    "make",
    [torch.Tensor.to_sparse, lambda x: torch.nested.as_nested_tensor([*x], layout=torch.jagged)],
)
def test_tensors_whose_samples_cannot_be_cut_out_are_not_divided(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Torch would fail at the slice, with a page about its backends."""
    held = make(torch.eye(4))
    message = (
        "wanted tensors to divide into accumulate=2 micro-batches, got one of layout "
        f"{str(held.layout).removeprefix('torch.')}, whose samples cannot be cut out; make it dense, or use "
        "accumulate=1 with smaller batches"
    )
    with pytest.raises(BatchError) as caught:
        batches.split({"a": held, "x": torch.zeros(4)}, 2)
    assert str(caught.value) == message


def test_lists_of_texts_are_divided_with_the_samples() -> None:
    """A loader makes them of names, whatever the batch is; of another length they are something else."""
    x, names = torch.zeros(4), ["a", "b", "c", "d"]
    for batch in ({"x": x, "v": names}, UserDict(x=x, v=names)):
        (first, _), (second, _) = batches.split(batch, 2)
        assert (first["v"], second["v"]) == (names[:2], names[2:])
    assert batches.split([x, names], 2)[1][0][1] == names[2:]
    for other in (names[:3], [*names, "e"], tuple(names)):
        assert batches.split((x, other), 2)[1][0][1] == other


def boxes(*numbers: int) -> list[dict[str, object]]:
    """Targets of a detector, one dictionary for each image, with as many boxes each."""
    return [{"boxes": torch.full((n, 4), float(i)), "name": str(i)} for i, n in enumerate(numbers)]


@pytest.mark.parametrize("numbers", [(1, 3, 0, 2), (4, 4, 4, 4), (2, 2, 2, 2)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_one_dictionary_for_each_sample_are_divided(
    numbers: tuple[int, ...], kind: type
) -> None:
    """Boxes were cut instead, in every image, where all had as many as there are images."""
    targets = kind(boxes(*numbers))
    stacked, listed = torch.arange(4.0), kind(torch.zeros(3, n, 4) for n in (5, 6, 7, 8))
    for images in (stacked, listed):
        for batch in ((images, targets), UserDict(images=images, targets=targets)):
            (first, share), (second, _) = batches.split(batch, 2)
            for part, wanted in ((first, slice(0, 2)), (second, slice(2, 4))):
                cut, beside = part.values() if isinstance(part, UserDict) else part
                assert (len(cut), beside) == (2, targets[wanted])
                assert images is stacked or all(map(operator.is_, cut, listed[wanted]))
            assert share == 0.5
    if len(set(numbers)) > 1:
        assert batches.split(targets, 2)[0][0] == targets[:2]


def test_lists_of_other_dictionaries_are_divided_by_rows() -> None:
    """Queries beside passages are two dictionaries of all samples, whatever else the batch holds."""
    pair = [{"ids": torch.arange(4)}, {"ids": torch.arange(4) + 4}]
    for batch in ((pair, torch.arange(4)), (pair,)):
        (_, (second, _)) = batches.split(batch, 2)
        assert [side["ids"].tolist() for side in second[0]] == [[2, 3], [6, 7]]
    crops = [torch.arange(4), torch.arange(4) + 4]
    assert [crop.tolist() for crop in batches.split(crops, 2)[1][0]] == [[2, 3], [6, 7]]


def test_lists_that_may_hold_samples_or_rows_are_not_divided() -> None:
    """Either guess may be wrong, and neither would be noticed."""
    batch = ([torch.zeros(3, 5), torch.zeros(3, 6)], boxes(3, 3))
    with pytest.raises(BatchError) as caught:
        batches.split(batch, 2)
    assert str(caught.value) == (
        "wanted a batch that shows what belongs to a sample, to divide into accumulate=2 micro-batches, got "
        "lists of 2 dictionaries and of 2 tensors, all of which have 3 rows, where lists or rows may be the "
        "samples; stack the tensors, or use accumulate=1 with smaller batches"
    )


@pytest.mark.parametrize("values", [[1, 2, 3, 4], [0.5, 1, 2, 3]])
def test_lists_with_as_many_numbers_as_samples_are_not_divided(values: list[object]) -> None:
    """Whole, they would stand beside the wrong samples in every part but the first."""
    x = torch.zeros(4)
    message = (
        "wanted what belongs to a sample as tensors or arrays to divide into accumulate=2 micro-batches, got a "
        f"list of 4 numbers such as {values[0]!r} beside 4 samples; make it an array, which is divided, or a "
        "tuple, which each part gets whole"
    )
    for batch in ({"x": x, "v": values}, Pair(x, UserDict(y=x, v=values))):
        with pytest.raises(BatchError) as caught:
            batches.split(batch, 2)
        assert str(caught.value) == message
    assert batches.split((x, values[:3]), 2)[1][0][1] == values[:3]
    assert batches.split((x, tuple(values)), 2)[1][0][1] == tuple(values)
    (_, (second, _)) = batches.split((x, numpy.array(values)), 2)
    assert second[1].tolist() == numpy.array(values)[2:].tolist()
