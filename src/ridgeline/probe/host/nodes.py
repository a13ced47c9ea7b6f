"""The nodes of a host with non-uniform memory access (NUMA), and what one's memory costs another's cores."""

from pathlib import Path
from typing import NamedTuple

from ridgeline.machine.microarchitecture import Node, NodePath, Nodes
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.host.memory_levels import Walked
from ridgeline.probe.host.processors import SYSTEM, allowed, numbers, pinned, text_of
from ridgeline.probe.turns import in_turns

ROUNDS, LEAST_S = 21, 1.0
MOST_STRAY = 0.1
"""Share of the memory that may lie on another node than the one that it was written from."""


class Described(NamedTuple):
    """A node as the system describes it; `usable` are its cores that this process may use."""

    index: int
    cores: tuple[int, ...]
    memory_bytes: int
    usable: tuple[int, ...]


def measure_nodes(
    num_bytes: int, system: Path = SYSTEM, process: Path = Path("/proc/self")
) -> Nodes:
    """The nodes, and where there are several, loads and reading from each to each.

    `num_bytes` are walked through on each node.

    Raises:
        MachineError: there are several, and no C compiler to make the loops with.

    Cost: nothing where there is one. Else one core for about 4 s a node and two a path, and so much
        memory.
    """
    described = describe(system)
    nodes = tuple(
        Node(index=n.index, cores=len(n.cores), memory_bytes=n.memory_bytes) for n in described
    )
    ends = [node for node in described if node.usable]
    if len(nodes) < 2:
        return Nodes(nodes=nodes, reason="one node" if nodes else "the system describes no nodes")
    if len(ends) < 2:
        where = f"node {ends[0].index}" if ends else "no node"
        return Nodes(nodes=nodes, reason=f"this process may use cores of {where} only")
    paths: list[NodePath] = []
    strays: list[str] = []
    for memory in ends:
        with pinned(memory.usable):
            walked = Walked(num_bytes)  # memory lies where it is first written from
        with walked:
            for cores in ends:
                with pinned(cores.usable[:1]):
                    loops = {"access": walked.timed_access(), "word": walked.timed_word()}
                    found = in_turns(loops, ROUNDS, LEAST_S)
                times = {name: Sampled.measured(taken, "s") for name, taken in found.items()}
                paths.append(NodePath(cores_of=cores.index, memory_of=memory.index, **times))
            # The system may have put pages elsewhere, where the node was full.
            share = share_on(memory.index, walked.address, process)
        if share is not None and share < 1 - MOST_STRAY:
            strays.append(
                f"{100 * (1 - share):.0f} % of the memory of node {memory.index} lay elsewhere"
            )
    return Nodes(nodes=nodes, paths=tuple(paths), num_bytes=num_bytes, reason="; ".join(strays))


def describe(system: Path = SYSTEM) -> tuple[Described, ...]:
    """The nodes that the system has, ascending; none where it does not tell."""
    usable = allowed()
    found: list[Described] = []
    for folder in (system / "node").glob("node[0-9]*"):
        cores, memory = numbers(text_of(folder / "cpulist")), text_of(folder / "meminfo")
        if not memory:
            continue
        kib = next((line.split()[3] for line in memory.splitlines() if "MemTotal:" in line), "0")
        mine = tuple(core for core in cores if core in usable)
        found.append(Described(int(folder.name.removeprefix("node")), cores, int(kib) << 10, mine))
    return tuple(sorted(found))


def share_on(node: int, address: int, process: Path = Path("/proc/self")) -> float | None:
    """Share of the memory that begins at an address on a node; None where the system does not tell."""
    for line in text_of(process / "numa_maps").splitlines():
        words = line.split()
        # The mapping is its own, so it begins where its memory does.
        if words and int(words[0], 16) == address:
            pages = dict(word[1:].split("=") for word in words if word[0] == "N" and "=" in word)
            total = sum(map(int, pages.values()))
            return int(pages.get(str(node), 0)) / total if total else None
    return None
