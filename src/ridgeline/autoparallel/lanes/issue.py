"""In which pieces a schedule is issued to its lanes, and which events hold the pieces in order.

The host issues the nodes of all lanes one after the other. Consecutive nodes of one lane with no
event between them are one piece: it is entered, waits for what it needs, runs, and signals, so the
cost of switching lanes is paid once a piece instead of once a node.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ridgeline.autoparallel.scheduling.schedule import Schedule

Values = TypeVar("Values")


class IssuedPiece(NamedTuple):
    """Nodes that are issued to one lane without an event between them.

    It begins when the nodes on other lanes in `waits` are done; `signals`: others wait for its last node.
    """

    lane: int
    nodes: tuple[int, ...]
    waits: tuple[int, ...] = ()
    signals: bool = False


def pieces(schedule: Schedule) -> tuple[IssuedPiece, ...]:
    """The pieces of a schedule, in an order in which the host can issue them.

    A node that waits begins a piece, and a node that others wait for ends one. So a piece only ever depends
    on pieces whose last node comes before its own first node, and the order of first nodes will do.
    """
    waits, signals = schedule.waits(), schedule.signals()
    found: list[tuple[int, list[int]]] = []
    open_piece: dict[int, list[int]] = {}
    for node in schedule.order:
        lane = schedule.lane_of[node]
        if lane not in open_piece or node in waits:
            open_piece[lane] = []
            found.append((lane, open_piece[lane]))
        open_piece[lane].append(node)
        # Nodes behind it would be part of what others wait for, though they need not be.
        if node in signals:
            del open_piece[lane]
    return tuple(
        IssuedPiece(lane, tuple(nodes), waits.get(nodes[0], ()), nodes[-1] in signals)
        for lane, nodes in found
    )


class Lanes(Protocol):
    """What carries out pieces: CUDA streams, or something that only takes notes.

    A call is `fork`, then for each piece `enter`, its waits, the work, `signal`, and finally `join`.
    """

    def fork(self) -> None:
        """Begin a call: every lane comes after what the caller has enqueued so far."""

    def enter(self, lane: int) -> None:
        """What is issued from here on goes to this lane."""

    def wait(self, node: int) -> None:
        """The entered lane waits until this node, which has signalled, is done."""

    def signal(self, node: int) -> None:
        """Others can wait for what has been issued to the entered lane so far."""

    def join(self) -> None:
        """End a call, also one that failed: what the caller enqueues next comes after all lanes."""


def carry_out(
    lanes: Lanes, work: Sequence[tuple[IssuedPiece, Callable[[Values], object]]], values: Values
) -> None:
    """One call: every piece on its lane, after what it waits for.

    `work` has the pieces in an order in which they can be issued, with what each does to the values.
    """
    lanes.fork()
    try:
        for piece, act in work:
            lanes.enter(piece.lane)
            for node in piece.waits:
                lanes.wait(node)
            act(values)
            if piece.signals:
                lanes.signal(piece.nodes[-1])
    finally:
        lanes.join()
