"""Cores of this process, their threads and their flags, as the system describes them."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.probe.host.processors import allowed, flags, numbers, pinned, two_apart


@given(st.sets(st.integers(0, 300)))
def test_lists_are_read_as_the_system_writes_them(cores: set[int]) -> None:
    """Single numbers and ranges, in any mixture."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1 and core % 5:
            parts[-1].append(core)
        else:
            parts.append([core])
    text = ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
    assert numbers(f"{text}\n") == tuple(sorted(cores))


def test_two_cores_are_not_two_threads_of_one(tmp_path: Path) -> None:
    """The first two that share nothing; undescribed ones count each for itself."""
    for core, text in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        folder = tmp_path / "cpu" / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text)
    assert two_apart((0, 1, 2, 3), tmp_path) == (0, 1)
    assert two_apart((0, 2, 3), tmp_path) == (0, 3)
    assert two_apart((1, 3), tmp_path) is None
    assert two_apart((7,), tmp_path) is None
    assert two_apart((7, 9), tmp_path) == (7, 9)


def test_a_pinned_thread_goes_back() -> None:
    """Also after an error."""
    before = os.sched_getaffinity(0)
    first = min(before)
    seen = []

    def run() -> None:
        with pinned({first}):
            seen.append(allowed())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert seen == [(first,)]
    assert os.sched_getaffinity(0) == before
    assert allowed() == tuple(sorted(before))


def test_flags_of_the_first_processor(tmp_path: Path) -> None:
    """On x86 they are called flags, on ARM Features; a system without the file tells none."""
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu sse2 avx\n\nprocessor\t: 1\nflags\t\t: other\n")
    assert flags(path) == {"fpu", "sse2", "avx"}
    path.write_text("processor\t: 0\nFeatures\t: fp asimd sve\n")
    assert flags(path) == {"fp", "asimd", "sve"}
    path.write_text("processor\t: 0\n")
    assert flags(path) == flags(tmp_path / "none") == frozenset()
