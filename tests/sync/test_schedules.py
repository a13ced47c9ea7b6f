"""Who sends what to whom, before anything is sent: rings, trees and hosts."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import PlanError
from ridgeline.runtime.sync.transports.hierarchical import check_hosts
from ridgeline.runtime.sync.transports.hosts import by_host
from ridgeline.runtime.sync.transports.messages import Message, Messages
from ridgeline.runtime.sync.transports.ring import (
    ALIGNED,
    Cut,
    Lap,
    Move,
    num_pieces,
    ring_moves,
    run_laps,
)
from ridgeline.runtime.sync.transports.scaling import UNSCALED
from ridgeline.runtime.sync.transports.tree import Tree, place_in_tree
from ridgeline.runtime.sync.transports.two_shot import check_dtype, check_offered
from ridgeline.synchronisation.placed import parted

sizes = st.integers(2, 9)


@given(st.integers(0, 5000), sizes, st.integers(1, 5))
def test_a_ring_adds_all_and_tells_all(num_elements: int, size: int, pieces: int) -> None:
    """Followed move by move: sums hold every worker once, everyone has them, and what is sent is there."""
    cut = Cut.of(num_elements, size, pieces)
    moves = [ring_moves(cut, position, size) for position in range(size)]
    # By worker, share and piece: whose values its sum holds.
    held = [
        {cut.span(share, piece): {me} for share in range(size) for piece in range(pieces)}
        for me in range(size)
    ]
    for number in range(2 * (size - 1) * pieces):
        sent = [set(held[me][moves[me][number].sends]) for me in range(size)]
        for me in range(size):
            move, incoming = moves[me][number], sent[me - 1]
            assert moves[me - 1][number].sends == move.receives
            if move.receives[0] == move.receives[1]:
                continue  # nothing: pieces of nothing share a name
            if move.slot is None:
                held[me][move.receives] = incoming
            else:
                assert not incoming & held[me][move.receives]
                held[me][move.receives] |= incoming
                assert move.is_sum == (len(held[me][move.receives]) == size)
    everyone = set(range(size))
    assert all(
        found == everyone for mine in held for (begin, end), found in mine.items() if begin < end
    )


@given(st.integers(1, 1 << 20), sizes, st.integers(1, 5))
def test_what_a_ring_sends_does_not_grow_with_it(num_elements: int, size: int, pieces: int) -> None:
    """Twice (n-1)/n of the payload, but for shares that are rounded up."""
    cut = Cut.of(num_elements, size, pieces)
    for position in range(size):
        moves = ring_moves(cut, position, size)
        sent = sum(end - begin for begin, end in (move.sends for move in moves))
        assert sent <= 2 * (size - 1) * (num_elements / size + pieces * ALIGNED)
        assert sent >= 2 * (num_elements - cut.share)


@given(st.integers(1, 2000), sizes, st.integers(1, 5))
def test_pieces_that_are_on_their_way_have_memory_of_their_own(
    num_elements: int, size: int, pieces: int
) -> None:
    """A slot is taken again only by the move that waits for the one before in it."""
    cut = Cut.of(num_elements, size, pieces)
    moves: list[Move] = ring_moves(cut, 0, size)[: (size - 1) * pieces]
    slots = [move.slot for move in moves]
    assert slots[:pieces] == [piece * cut.piece for piece in range(pieces)]
    assert all(slots[number] == slots[number - pieces] for number in range(pieces, len(slots)))
    assert all(move.receives[1] - move.receives[0] <= cut.piece for move in moves)


@pytest.mark.parametrize(
    ("share_bytes", "pieces"),
    [((1 << 20) - 4, 1), (1 << 20, 2), (8 << 20, 2), (12 << 20, 3), (64 << 20, 4)],
)
def test_small_shares_are_one_message(share_bytes: int, pieces: int) -> None:
    """Every message wakes two threads; of larger ones a part is added while others travel."""
    values = torch.empty(2 * share_bytes // 4, device="cpu")
    assert num_pieces(values, 2, {"pieces": 0}) == pieces
    assert num_pieces(values, 2, {"pieces": 5}) == 5


@given(st.integers(1, 300))
def test_a_tree_reaches_all_in_few_steps(size: int) -> None:
    """Parents and children agree, and no worker is deeper than the logarithm of their number."""
    places = [place_in_tree(rank, size) for rank in range(size)]
    assert places[0][0] is None
    for rank, (parent, children) in enumerate(places):
        assert all(places[child][0] == rank for child in children)
        depth, above = 0, parent
        while above is not None:
            depth, above = depth + 1, places[above][0]
        assert depth <= math.ceil(math.log2(size))
        assert parent is None or rank in places[parent][1]
    assert sum(len(children) for _, children in places) == size - 1
    assert len(places[0][1]) == math.ceil(math.log2(size))


class _Batches(Messages):
    """Keeps what one worker would enqueue on a GPU: by batch, the directions to each peer."""

    def __init__(self) -> None:
        self.on_device = True
        self.batches: list[dict[int, set[str]]] = []
        self._sent = []

    def _enqueued(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Any]:
        batch: dict[int, set[str]] = {}
        for messages, direction in ((receives, "from"), (sends, "to")):
            for message in messages:
                if message.tensor.numel():
                    batch.setdefault(message.peer, set()).add(direction)
        if batch:
            self.batches.append(batch)
        return []


def _of_tree(rank: int, size: int) -> _Batches:
    messages = _Batches()
    parent, children = place_in_tree(rank, size)
    tree = SimpleNamespace(
        _messages=messages,
        _parent=parent,
        _children=children,
        scaling=UNSCALED,
        scratch=torch.empty_like,
    )
    Tree.add_up(cast("Tree", tree), torch.zeros(8))
    return messages


def _of_ring(rank: int, size: int) -> _Batches:
    messages = _Batches()
    values = torch.zeros(1000)
    moves = ring_moves(Cut.of(1000, size, 2), rank, size)
    following = (rank + 1) % size
    lap = Lap(values, torch.empty_like(values), moves, (rank - 1) % size, following)
    run_laps((lap,), 2, UNSCALED, messages)
    return messages


@pytest.mark.parametrize("make", [_of_tree, _of_ring])
@given(size=st.integers(2, 20))
def test_batches_of_two_workers_name_the_same_directions(
    make: Callable[[int, int], _Batches], size: int
) -> None:
    """NCCL connects two workers in the batches that name each other first, and waits for what one lacks."""
    batches = [make(rank, size).batches for rank in range(size)]
    mirrored = {"from": "to", "to": "from"}
    for rank, peer in itertools.permutations(range(size), 2):
        mine = [batch[peer] for batch in batches[rank] if peer in batch]
        other = [batch[rank] for batch in batches[peer] if rank in batch]
        assert mine == [{mirrored[direction] for direction in batch} for batch in other]


def test_workers_by_host() -> None:
    """By the names that they tell, in any order of ranks; or as many as are told to share one."""
    assert by_host([b"a", b"b", b"a", b"b"]) == [[0, 2], [1, 3]]
    assert parted(5, 2) == [[0, 1], [2, 3], [4]]
    check_hosts([[0, 2], [1, 3]])


INSTEAD = "use sync.algorithm='all_reduce'"


def test_what_two_shots_cannot_do_is_refused() -> None:
    """By name: a torch without kernels, several hosts, and other types."""
    check_offered((), [[0, 1]])
    check_dtype(torch.bfloat16)
    cases = [
        (
            lambda: check_offered(("one", "two"), [[0, 1]]),
            (
                "wanted a torch with kernels on symmetric memory for sync.algorithm='two_shot', got "
                f"{torch.__version__} without one, two; {INSTEAD}"
            ),
        ),
        (
            lambda: check_offered((), [[0], [1]]),
            (
                "wanted workers on one host for sync.algorithm='two_shot', got 2 hosts; "
                f"{INSTEAD}, or 'hierarchical'"
            ),
        ),
        (
            lambda: check_dtype(torch.float16),
            (
                "wanted parameters of float32 or bfloat16 for sync.algorithm='two_shot', got float16; "
                f"{INSTEAD}"
            ),
        ),
    ]
    for call, message in cases:
        with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
            call()
