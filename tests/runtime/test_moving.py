"""Batches on their way to a device: objects that hold tensors go with them, as a plain loop moves them."""

import dataclasses
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from ridgeline.feeding.channel import HostChannel
from ridgeline.feeding.slots import Carrier, Slot
from ridgeline.tensors.batch import to_device

META = torch.device("meta")
CPU = torch.device("cpu")


class Graph:
    """Moves itself in place, as graphs of a library's do."""

    def __init__(self) -> None:
        self.x = torch.zeros(2)
        self.moves = 0

    def to(self, device: torch.device) -> Self:
        self.x = self.x.to(device)
        self.moves += 1
        return self


class Encoding(dict[str, Tensor]):
    """Has a `to` that gives nothing back."""

    def __init__(self) -> None:
        super().__init__(ids=torch.zeros(2))

    def to(self, device: torch.device) -> None:
        self["ids"] = self["ids"].to(device)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Frozen, with a nest in it, and without a `to`."""

    x: Tensor
    others: dict[str, Tensor]
    name: str = "pair"


class Keeping:
    """Has no `to`, and is none of the kinds whose parts are known."""

    def __init__(self) -> None:
        self.x = torch.zeros(2)


def devices(*tensors: Tensor) -> list[str]:
    return [tensor.device.type for tensor in tensors]


def test_an_object_is_moved_by_its_own_method() -> None:
    """On a copy: the loader's own object is as it was."""
    graph = Graph()
    batch = to_device((graph, torch.zeros(1)), META)
    assert devices(batch[0].x, batch[1]) == ["meta", "meta"]
    assert (type(batch[0]), batch[0].moves, graph.moves, graph.x.device) == (Graph, 1, 0, CPU)
    encoding = Encoding()
    there = to_device(encoding, META)
    assert devices(there["ids"], encoding["ids"]) == ["meta", "cpu"]


def test_a_dataclass_is_moved_field_by_field() -> None:
    """Frozen or not; what is no tensor stays."""
    pair = Pair(torch.zeros(1), {"y": torch.zeros(1)})
    there = to_device([pair], META)[0]
    assert (
        devices(there.x, there.others["y"], pair.x, pair.others["y"]) == ["meta"] * 2 + ["cpu"] * 2
    )
    assert (type(there), there.name) == (Pair, "pair")


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:
    """They are tuples, and may not be moved element by element."""
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    there = to_device({"x": packed}, META)["x"]
    assert devices(there.data, there.batch_sizes) == ["meta", "cpu"]


@pytest.mark.parametrize("make", [Keeping, lambda: nn.Linear(1, 1), lambda: "text"])
def test_what_has_no_known_way_stays_where_it_is(make: Any) -> None:
    """A loss that takes it moves its tensors itself."""
    part = make()
    assert to_device([part, torch.zeros(1)], META)[0] is part


@pytest.mark.parametrize("place", [CPU, META])
def test_what_is_there_already_is_the_same_object(place: torch.device) -> None:
    """A captured step knows it by that."""
    graph = Graph().to(place)
    batch = (graph, torch.zeros(1, device=place))
    assert to_device(batch, place) is batch
    assert to_device(graph, place) is graph


def test_a_feed_moves_objects_when_it_hands_them_over() -> None:
    """The ring carries tensors alone."""

    class MetaChannel(HostChannel):
        device = META  # type: ignore[assignment]

        def takes(self, leaf: Tensor) -> bool:
            return False

    carrier = Carrier(MetaChannel(), fixed_addresses=False, margin=1)
    slot, graph = Slot(), Graph()
    packed = pack_sequence([torch.ones(2, 2)])
    left = carrier.pack(slot, (graph, packed, torch.zeros(1)))
    assert left[0] is graph
    assert left[1] is packed
    given = carrier.receive(slot)
    assert devices(given[0].x, given[1].data, given[2]) == ["meta"] * 3
    assert graph.x.device == CPU
