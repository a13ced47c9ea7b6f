"""Walks through memory, the caches that the system describes, and the loops that are compiled for them."""

import ctypes
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import MachineError
from ridgeline.probe import native
from ridgeline.probe.host.caches import Cache, caches
from ridgeline.probe.host.memory_levels import LINE_BYTES, Walked


def steps(walked: Walked, count: int) -> list[int]:
    """Where the loop is after every 16 loads, from where it begins."""
    places = []
    for _ in range(count):
        native.library().ridgeline_chase(ctypes.byref(walked._at), 16)
        places.append(walked._at.value - walked.address)
    return places


@settings(max_examples=20)
@given(st.integers(2, 200), st.integers(0, 1 << 30))
def test_a_walk_is_one_circle_through_all_lines(num_lines: int, seed: int) -> None:
    """Each line once, then the first again: otherwise a part would stay in a nearer cache."""
    with Walked(num_lines * LINE_BYTES, seed) as walked:
        words = (ctypes.c_uint64 * (num_lines * LINE_BYTES // 8)).from_address(walked.address)
        at, seen = walked._at.value, []
        for _ in range(num_lines):
            seen.append((at - walked.address) // LINE_BYTES)
            at = words[(at - walked.address) // 8]
        assert sorted(seen) == list(range(num_lines))
        assert at == walked._at.value


def test_the_loop_follows_the_walk_and_goes_on() -> None:
    """After as many loads as there are lines it is where it began, by way of other lines."""
    with Walked(64 * LINE_BYTES) as walked:
        begun = walked._at.value - walked.address
        places = steps(walked, 8)
    assert places[3] == places[7] == begun
    assert len(set(places)) == 4
    assert all(place % LINE_BYTES == 0 for place in places)


def test_what_an_access_costs() -> None:
    """All three times are above nothing, and read in order a word costs less than a load that waits."""
    with Walked(1 << 16) as walked:
        access, word, line = walked.access(), walked.word(), walked.line()
    assert access.n == word.n == line.n == 7
    # The shorter samples, since other programs only add to one.
    assert 0.0 < word.low < access.low
    assert 0.0 < line.low < access.low


def test_caches_of_data_only(tmp_path: Path) -> None:
    """Those for instructions are left out, and what is not described."""
    described = {
        "index0": ("Data", "1", "48K"),
        "index1": ("Instruction", "1", "32K"),
        "index2": ("Unified", "2", "2M"),
        "index3": ("Unified", "3", "1G"),
    }
    for name, words in described.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, word in zip(("type", "level", "size"), words, strict=True):
            (folder / file).write_text(f"{word}\n")
    (tmp_path / "index4").mkdir()
    assert caches(tmp_path) == (Cache(1, 48 << 10), Cache(2, 2 << 20), Cache(3, 1 << 30))
    assert caches(tmp_path / "none") == ()


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a folder for compilers; nothing else is in PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "bin").mkdir()
    return tmp_path


def test_without_a_compiler(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked for, and what to do."""
    monkeypatch.setenv("PATH", str(cold / "bin"))
    with pytest.raises(MachineError) as refused:
        native.library.__wrapped__()
    assert str(refused.value) == (
        "wanted a C compiler to time memory with, got none of cc, gcc, clang in PATH; install one (on Debian: apt "
        "install gcc) or name it in CC"
    )


def test_a_compiler_that_fails(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first line is told, and nothing is kept of it."""
    compiler = cold / "bin" / "broken"
    compiler.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 4\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(MachineError) as refused:
        native.library.__wrapped__()
    assert str(refused.value) == (
        f"wanted to compile the loops that time memory with {compiler}, got status 4: no such flag; name another "
        "compiler in CC"
    )
    assert list((cold / "cache" / "ridgeline" / "native").iterdir()) == []


def test_it_is_compiled_once(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process takes what the first has made."""
    made = []
    compile_ = native._compile
    monkeypatch.setattr(
        native, "_compile", lambda *given: (made.append(given[2]), compile_(*given))
    )
    native.library.__wrapped__()
    native.library.__wrapped__()
    assert len(made) == 1
    assert made[0].is_file()
    # One that is damaged is no reason to stop, nor is a cache that cannot be written.
    damaged = cold / "ridgeline" / "native" / made[0].name
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    monkeypatch.setattr(native.tempfile, "tempdir", str(cold))
    for cache in (str(cold), os.devnull):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        native.library.__wrapped__()
    assert [path.parent.parent for path in made if path.name == "once.so"] == [cold, cold]
    assert not list(cold.glob("ridgeline-native-*"))


def test_no_place_for_the_compiled_loops(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the cache nor elsewhere: what to do about either."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setattr(native.tempfile, "tempdir", str(cold / "none"))
    with pytest.raises(MachineError) as refused:
        native.library.__wrapped__()
    told = str(refused.value)
    assert told.startswith(
        "wanted a place for the loops that time memory, got [Errno 2] No such file or"
    )
    assert told.endswith(
        " also outside the cache; let XDG_CACHE_HOME or TMPDIR name a directory that can be written and run from"
    )
