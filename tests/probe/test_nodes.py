"""Nodes of memory: as the system describes them, each path between two, and where there is nothing to measure."""

import os
from pathlib import Path

import pytest

from ridgeline.machine.microarchitecture import Node
from ridgeline.probe.host import nodes
from ridgeline.probe.host.nodes import Described, describe, measure_nodes, share_on


def described(system: Path, cores: dict[int, str]) -> Path:
    """Nodes with such cores, and a GiB each."""
    for index, text in cores.items():
        folder = system / "node" / f"node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
        (folder / "meminfo").write_text(
            f"Node {index} MemTotal:        1048576 kB\nNode {index} MemFree:   4 kB\n"
        )
    return system


@pytest.fixture
def no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be walked through."""
    monkeypatch.setattr(nodes, "Walked", lambda *_: pytest.fail("walked"))


def test_nodes_are_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and not by name; cores that this process may not use are counted, but not usable."""
    monkeypatch.setattr(nodes, "allowed", lambda: (1, 2, 8))
    system = described(tmp_path, {10: "8-9", 2: "0-3", 11: ""})
    (system / "node" / "node12").mkdir()
    assert describe(system) == (
        Described(2, (0, 1, 2, 3), 1 << 30, (1, 2)),
        Described(10, (8, 9), 1 << 30, (8,)),
        Described(11, (), 1 << 30, ()),
    )
    assert describe(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("cores", "usable", "reason"),
    [
        ({0: "0-3"}, (0, 1), "one node"),
        ({}, (0, 1), "the system describes no nodes"),
        ({0: "0-1", 1: "2-3"}, (2,), "this process may use cores of node 1 only"),
        ({0: "0-1", 1: ""}, (0, 1), "this process may use cores of node 0 only"),
        ({0: "0-1", 1: "2-3"}, (7,), "this process may use cores of no node only"),
    ],
)
def test_without_two_nodes_nothing_is_measured(
    no_walk: None,
    cores: dict[int, str],
    usable: tuple[int, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says why; the nodes are in the profile all the same."""
    monkeypatch.setattr(nodes, "allowed", lambda: usable)
    found = measure_nodes(1 << 16, described(tmp_path, cores))
    assert found.reason == reason
    assert (found.paths, found.num_bytes) == ((), 0)
    assert [node.index for node in found.nodes] == list(cores)


def test_every_path_is_measured_from_the_cores_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is written from its own node, and read from each; afterwards this thread is where it was."""
    pins: list[tuple[str, set[int]]] = []
    usable = min(os.sched_getaffinity(0))
    pin = os.sched_setaffinity

    def noted(process: int, cores: set[int]) -> None:
        pins.append(("", set(cores)))
        pin(process, {usable})

    class Laid(nodes.Walked):
        def __init__(self, num_bytes: int) -> None:
            pins.append(("written", pins[-1][1]))
            super().__init__(num_bytes)

        def timed_access(self) -> object:  # type: ignore[override]
            pins.append(("read", pins[-1][1]))
            return lambda: 5e-9

        def timed_word(self) -> object:  # type: ignore[override]
            return lambda: 1e-9

    before = os.sched_getaffinity(0)
    monkeypatch.setattr(nodes, "allowed", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(nodes, "ROUNDS", 2)
    monkeypatch.setattr(nodes, "LEAST_S", 0.0)
    monkeypatch.setattr(nodes, "Walked", Laid)
    monkeypatch.setattr(os, "sched_setaffinity", noted)
    system = described(tmp_path, {0: "0-1", 1: "2-3"})
    found = measure_nodes(1 << 16, system, process=tmp_path)
    monkeypatch.undo()
    os.sched_setaffinity(0, before)
    assert [what for what in pins if what[0]] == [
        ("written", {0, 1}),
        ("read", {0}),
        ("read", {2}),
        ("written", {2, 3}),
        ("read", {0}),
        ("read", {2}),
    ]
    assert found.nodes == tuple(Node(index=i, cores=2, memory_bytes=1 << 30) for i in (0, 1))
    ends = [(path.cores_of, path.memory_of) for path in found.paths]
    assert ends == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(len(path.access.samples) == len(path.word.samples) == 2 for path in found.paths)
    assert all((path.access.value, path.word.value) == (5e-9, 1e-9) for path in found.paths)
    assert (found.num_bytes, found.reason) == (1 << 16, "")


def test_memory_that_lies_elsewhere_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system may place it on another node than the one that it was first written from."""
    usable = min(os.sched_getaffinity(0))
    monkeypatch.setattr(nodes, "ROUNDS", 1)
    monkeypatch.setattr(nodes, "LEAST_S", 0.0)
    monkeypatch.setattr(
        nodes,
        "describe",
        lambda _: tuple(Described(index, (usable,), 1 << 30, (usable,)) for index in (0, 1)),
    )
    monkeypatch.setattr(nodes, "share_on", lambda node, *_: (0.95, 0.25)[node])
    found = measure_nodes(1 << 16)
    assert found.reason == "75 % of the memory of node 1 lay elsewhere"
    assert len(found.paths) == 4


def test_where_memory_lies(tmp_path: Path) -> None:
    """By the mapping that begins at the address; other systems do not tell."""
    (tmp_path / "numa_maps").write_text(
        "7f00000000 default anon=4 dirty=4 N0=4 kernelpagesize_kB=4\n"
        "7f00a00000 default anon=100 dirty=100 active=0 N0=25 N1=75 kernelpagesize_kB=4\n"
        "7f00b00000 default\n"
    )
    assert share_on(1, 0x7F00A00000, tmp_path) == 0.75
    assert share_on(0, 0x7F00A00000, tmp_path) == 0.25
    assert share_on(2, 0x7F00A00000, tmp_path) == 0.0
    assert share_on(0, 0x7F00B00000, tmp_path) is None
    assert share_on(0, 0x7F00C00000, tmp_path) is None
    assert share_on(0, 0x7F00A00000, tmp_path / "none") is None
