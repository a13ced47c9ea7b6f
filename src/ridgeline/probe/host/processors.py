"""Which cores this process may use, which of them are apart, and what they say that they can."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def text_of(path: Path) -> str:
    """Content of a small file of the system; empty where there is none, or it is not for us."""
    # Files of control groups differ by version, by level and by who mounts them; systems differ in the rest.
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def line_of(path: Path, name: str) -> str:
    """What follows a name at the beginning of a line of such a file; empty where there is none."""
    rest = (line[len(name) :] for line in text_of(path).splitlines() if line.startswith(name))
    return next(rest, "").strip()


def may_pin() -> bool:
    """Whether the system lets a thread choose its cores."""
    return hasattr(os, "sched_setaffinity")


def allowed() -> tuple[int, ...]:
    """Numbers of the cores that this thread may use, ascending; none where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if may_pin() else ()


@contextlib.contextmanager
def pinned(cores: Iterable[int]) -> Iterator[None]:
    """This thread runs on these cores only; afterwards where it ran before.

    Raises:
        OSError: the system refuses.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def two_apart(cores: Iterable[int], system: Path = SYSTEM) -> tuple[int, int] | None:
    """Two of these that do not share one core's caches as its threads do; None where there are none.

    Where the system does not tell what is shared, as on many virtual machines, each counts as a core.
    """
    return next(
        (
            (one, other)
            for one, other in itertools.combinations(cores, 2)
            if other not in _threads(one, system)
        ),
        None,
    )


def numbers(text: str) -> tuple[int, ...]:
    """A list as the system writes it, such as `0-3,8`, number by number."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the first processor says that it can, in the system's words; empty where it does not tell."""
    # x86 calls them flags, ARM features.
    words = line_of(path, "flags") or line_of(path, "Features")
    return frozenset(words.removeprefix(":").split())


def _threads(core: int, system: Path) -> tuple[int, ...]:
    text = text_of(system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list")
    return numbers(text) or (core,)
