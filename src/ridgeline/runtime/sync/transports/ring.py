"""The ring: every worker sends to the next one alone, and the time does not grow with the ring.

The payload is cut into as many shares as there are workers. In n-1 steps the sum of a share travels once
around, each worker adding its own (reduce-scatter); in n-1 more it travels finished (all-gather). A worker
sends 2 (n-1)/n of the payload. A share is cut into pieces: while one is added, others are on their way.

The order of additions of a share is that of the ring from where it begins, so a mean has the same bits on all
workers and in every run.

Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2),
2009.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ridgeline.runtime.sync.transports.messages import Message, Messages
from ridgeline.runtime.sync.transports.scaling import Scaling
from ridgeline.runtime.sync.transports.summing import SummingTransport
from ridgeline.synchronisation import OptionValue
from ridgeline.workers.world import World

PIECE_BYTES = 1 << 22
MOST_PIECES = 4
"""A share is cut into pieces of 4 MiB or more, four at most.

Source: measured over gloo, two workers on two cores. Every message wakes two threads: pieces of half a MiB
took 1.2 times as long at payloads of 4 and 8 MB, and at 64 MB it made no difference.
"""
HALVED_BYTES = 1 << 20
"""Over gloo a share of 1 MiB or more is cut in two at least: one half is added while the other is on its way.

Source: measured in turns, two workers on two cores with other work beside them; payloads of 2, 4, 8 and 16
MiB ran at 0.79, 0.68, 0.90 and 0.83 of gloo's own speed in one piece, 0.91, 0.77, 0.96 and 0.95 in two, and
0.82, 0.72, 0.73 and 0.88 in four.
"""
ALIGNED = 16
"""Shares and pieces begin at multiples of so many elements: a cache line of float32."""


class Move(NamedTuple):
    """What one worker does with one piece: [begin, end) of the payload that it sends and that it receives.

    Attributes:
        sends: What goes to the next worker.
        receives: What comes from the previous one.
        slot: Where it lands in the scratch memory, to be added; None: in its place, finished.
        is_sum: Whether the sum is complete once it is added.
    """

    sends: tuple[int, int]
    receives: tuple[int, int]
    slot: int | None
    is_sum: bool = False


class Cut(NamedTuple):
    """How a payload is cut into shares and pieces, in elements."""

    num_elements: int
    share: int
    piece: int
    pieces: int

    @staticmethod
    def of(num_elements: int, size: int, pieces: int) -> "Cut":
        """In `size` shares of `pieces` each; the last ones may be short, or empty."""
        piece = -(-num_elements // (size * pieces * ALIGNED)) * ALIGNED
        return Cut(num_elements, piece * pieces, piece, pieces)

    def span(self, share: int, piece: int) -> tuple[int, int]:
        """[begin, end) of a piece."""
        begin = share * self.share + piece * self.piece
        return min(begin, self.num_elements), min(begin + self.piece, self.num_elements)


def adding_moves(cut: Cut, position: int, size: int) -> list[Move]:
    """What the worker at a position of a ring does until it has the sum of share `position + 1`, in order.

    All pieces of a step, step by step. A move may start once the one that is `cut.pieces` before it has
    ended: that brought what it sends, and emptied its slot.
    """
    return [
        Move(
            cut.span((position - step) % size, piece),
            cut.span((position - step - 1) % size, piece),
            piece * cut.piece,
            step == size - 2,
        )
        for step in range(size - 1)
        for piece in range(cut.pieces)
    ]


def gathering_moves(cut: Cut, position: int, size: int) -> list[Move]:
    """What it does from there until it has all shares; the same order, and the same rule."""
    return [
        Move(
            cut.span((position + 1 - step) % size, piece),
            cut.span((position - step) % size, piece),
            None,
        )
        for step in range(size - 1)
        for piece in range(cut.pieces)
    ]


def ring_moves(cut: Cut, position: int, size: int) -> list[Move]:
    """Both, one after the other."""
    return adding_moves(cut, position, size) + gathering_moves(cut, position, size)


class Lap(NamedTuple):
    """One payload on its way around one ring."""

    values: Tensor
    scratch: Tensor
    moves: Sequence[Move]
    previous: int
    following: int


def neighbours(ring: Sequence[int], place: int) -> tuple[int, int]:
    """Who sends to a place of a ring, and who is sent to."""
    return ring[place - 1], ring[(place + 1) % len(ring)]


def run_laps(laps: Sequence[Lap], pieces: int, scaling: Scaling, messages: Messages) -> None:
    """Add up the payloads of all laps, scaled before, at once; each has as many moves as the others.

    Over gloo a receive is named as soon as its memory is free, and that of a finished share at once: it comes
    when all have this worker's part of it, and who sends need not ask first.

    Cost: On a CPU, blocks until they are there; on a GPU, enqueues.
    """
    num_moves = len(laps[0].moves)
    arriving: dict[int, list[Any]] = {}
    named = 0

    def name(ended: int) -> None:
        nonlocal named
        # In order: both ends match messages by the order in which they are named.
        while named < num_moves and (laps[0].moves[named].slot is None or named < ended + pieces):
            arriving[named] = messages.receive(_receives(laps, named))
            named += 1

    def start(number: int) -> None:
        sends = [
            Message(lap.values[slice(*lap.moves[number].sends)], lap.following) for lap in laps
        ]
        if number in arriving:
            messages.send(sends)
        else:
            arriving[number] = messages.start(_receives(laps, number), sends)

    if not messages.on_device:
        name(0)
    for number in range(min(pieces, num_moves)):
        start(number)
    for number in range(num_moves):
        works = arriving.pop(number)
        # NCCL has one work for all, gloo one for each lap: what is there is added while others arrive.
        for place in range(max(len(works), len(laps))):
            if place < len(works) and works[place] is not None:
                works[place].wait()
            if place < len(laps):
                _add(laps[place], laps[place].moves[number], scaling)
        if not messages.on_device:
            name(number + 1)
        if number + pieces < num_moves:
            start(number + pieces)
    messages.finish()


def _receives(laps: Sequence[Lap], number: int) -> list[Message]:
    return [Message(_landing(lap, lap.moves[number]), lap.previous) for lap in laps]


def _landing(lap: Lap, move: Move) -> Tensor:
    begin, end = move.receives
    if move.slot is None:
        return lap.values[begin:end]
    return lap.scratch[move.slot : move.slot + end - begin]


def _add(lap: Lap, move: Move, scaling: Scaling) -> None:
    if move.slot is None:
        return
    mine = lap.values[slice(*move.receives)].add_(_landing(lap, move))
    if move.is_sum:
        scaling.take_back(mine)


class Ring(SummingTransport):
    """Reduce-scatter and all-gather over point-to-point messages to the next worker, piece by piece."""

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        self._messages = Messages(self.group, on_device=self.on_device)

    def scratch_elements(self, num_elements: int) -> int:
        """One share."""
        return share_elements(num_elements, self.size, self.options)

    def add_up(self, values: Tensor) -> None:
        """Once around to add, once around to distribute."""
        pieces = num_pieces(values, self.size, self.options)
        cut = Cut.of(values.numel(), self.size, pieces)
        moves = ring_moves(cut, self.rank, self.size)
        lap = Lap(values, self.scratch(values), moves, *neighbours(range(self.size), self.rank))
        run_laps((lap,), pieces, self.scaling, self._messages)


def share_elements(num_elements: int, size: int, options: Mapping[str, OptionValue]) -> int:
    """Elements of a share at most, however many pieces it is cut into."""
    return -(-num_elements // size) + max(MOST_PIECES, int(options["pieces"])) * ALIGNED


def num_pieces(values: Tensor, size: int, options: Mapping[str, OptionValue]) -> int:
    """Into how many pieces each share is cut: as the option says, or by their bytes where it is 0."""
    share_bytes = values.nbytes // size
    least = 2 if values.device.type == "cpu" and share_bytes >= HALVED_BYTES else 1
    return int(options["pieces"]) or max(least, min(MOST_PIECES, share_bytes // PIECE_BYTES))
