"""Arguments that several verbs share, and how the words behind them are read."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from ridgeline.errors import LawError, MachineError
from ridgeline.machine.cluster import Level, parse_cluster
from ridgeline.machine.stragglers import Stragglers, parse_stragglers
from ridgeline.planner.knobs import INEXACT

MOST_COUNTS = 1000
"""Numbers that `...` may stand for: each is simulated, and a table with more is not read."""
MEASURED = "measured"
"""In the place of how devices differ: as their measurements do."""


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted a number of at least 1, got {value}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Numbers of at least 1, for argparse: `1,2,4`, or `1,2,4,...,64`, which continues as it began.

    Example:
        >>> counts("1,2,4,...,20")
        (1, 2, 4, 8, 16, 20)
        >>> counts("2,4,6,...,10")
        (2, 4, 6, 8, 10)
    """
    found: list[int] = []
    parts = text.split(",")
    for index, part in enumerate(parts):
        if part.strip() != "...":
            found.append(positive(part))
            continue
        end = positive(parts[index + 1]) if index + 1 < len(parts) else 0
        if not (len(found) > 1 and found[-2] < found[-1] < end):
            raise argparse.ArgumentTypeError(
                f"wanted two rising numbers before ... and a larger one after it, got {text!r}"
            )
        following = _going_on(found, end)
        if len(following) > MOST_COUNTS:
            raise argparse.ArgumentTypeError(
                f"wanted at most {MOST_COUNTS} numbers in place of ..., got {len(following)} in {text!r}; "
                "begin with numbers that are further apart, or that double"
            )
        found += following
    # Each once, in the order in which they are given.
    return tuple(dict.fromkeys(found))


def _going_on(found: Sequence[int], end: int) -> Sequence[int]:
    """What follows below `end`: 1, 2, 4 doubles, and 2, 4, 6 adds, as the step to the last number shows."""
    before, last = found[-2:]
    rise = last - before
    # A multiple of the number before it cannot rise evenly from a third one, which would be below 1.
    adds = last % before != 0
    return range(last + rise, end, rise) if adds else [*_powers(last, last // before, end)]


def _powers(last: int, factor: int, end: int) -> Iterator[int]:
    while (last := last * factor) < end:
        yield last


def cluster(text: str) -> tuple[Level, ...]:
    """A description of a cluster, for argparse; see `parse_cluster`."""
    try:
        return parse_cluster(text)
    except (LawError, MachineError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def stragglers(text: str) -> Stragglers | str:
    """How devices differ, for argparse: `measured`, or what `parse_stragglers` makes of it."""
    if text == MEASURED:
        return text
    try:
        return parse_stragglers(text)
    except MachineError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def seed(text: str) -> int:
    """A whole number that generators can be seeded with, for argparse."""
    value = _whole(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"wanted a number of 64 bits, got {value}")
    return value


def fraction(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a number above 0, got {text!r}") from None
    # NaN is refused, too: it is not above 0.
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted a number above 0, got {text}")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a whole number, got {text!r}") from None


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """TASK, its data and its batch size."""
    parser.add_argument("task", metavar="TASK", help="built-in name or Python file")
    group = parser.add_argument_group("task")
    group.add_argument("--data", metavar="DIR", help="directory of the task's data")
    group.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="samples per step over all workers together (default: the task's)",
    )


def add_machine_argument(parser: argparse.ArgumentParser) -> None:
    """A saved machine profile instead of this machine."""
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="machine profile (default: measure this machine)",
    )
    parser.set_defaults(cluster=None)  # verbs that take one add the argument


def add_allow_argument(parser: argparse._ActionsContainer) -> None:
    """Changes of the maths that the search may make."""
    parser.add_argument(
        "--allow",
        action="append",
        type=inexact,
        default=[],
        metavar="NAME",
        help=f"a change of the maths that may be chosen, once for each: {', '.join(INEXACT)} (default: none)",
    )


def inexact(text: str) -> str:
    """The name of a change of the maths, for argparse."""
    if text not in INEXACT:
        raise argparse.ArgumentTypeError(
            f"wanted a change of the maths out of {', '.join(INEXACT)}, got {text!r}"
        )
    return text
