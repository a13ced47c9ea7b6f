"""What is mounted where, as the system lists it for this process."""

import re
from pathlib import Path
from typing import NamedTuple

_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One entry of the list: the part `root` of a file system of type `kind`, seen below `point`."""

    point: Path
    kind: str
    root: str = "/"
    options: tuple[str, ...] = ()
    """Of the file system itself; control groups of version 1 name their controllers here."""


def mounts(root: Path = Path("/")) -> tuple[Mount, ...]:
    """All mounts, in the order in which they were made; none where the system keeps no such list.

    Below `root` is `proc`.

    Source: proc_pid_mountinfo(5): after the sixth word there are optional ones, and then a lone hyphen.
    """
    path = root / "proc/self/mountinfo"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        words = [_OCTAL.sub(lambda code: chr(int(code[1], 8)), word) for word in line.split(" ")]
        if "-" not in words[6:]:
            continue
        kind, _, options = (*words[words.index("-", 6) + 1 :], "", "", "")[:3]
        found.append(Mount(Path(words[4]), kind, words[3], tuple(options.split(","))))
    return tuple(found)


def mount_of(path: Path, root: Path = Path("/")) -> Mount:
    """The mount in which a path lies: the nearest above it, and of several there the last.

    The path is absolute; links in it are followed.
    """
    above = [mount for mount in mounts(root) if path.resolve().is_relative_to(mount.point)]
    longest = max((len(mount.point.parts) for mount in above), default=0)
    nearest = [mount for mount in above if len(mount.point.parts) == longest]
    return nearest[-1] if nearest else Mount(Path("/"), "unknown")
