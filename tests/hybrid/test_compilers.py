"""The C++ compiler of packaged programs: the configured one, unless what it makes crashes."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch._inductor import config

from ridgeline.packages import compilers
from ridgeline.packages.compilers import Compiler, working_compiler

SYSTEM = shutil.which("g++", path=os.defpath)
pytestmark = pytest.mark.skipif(SYSTEM is None, reason="needs g++ in a system folder")


Tried = dict[tuple[str, str | None], bool]
"""What came of trials, by compiler and PATH."""


@pytest.fixture(scope="module")
def tried() -> Tried:
    """Each trial compiles and imports torch, so that one is made of a compiler and read by all tests."""
    return {}


@pytest.fixture(autouse=True)
def _tries_once(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compilers.runs

    def runs(compiler: str) -> bool:
        asked = compiler, os.environ.get("PATH")
        if asked not in tried:
            tried[asked] = plain(compiler)
        return tried[asked]

    monkeypatch.setattr(compilers, "runs", runs)


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that builds without complaint what crashes when it is called."""
    code = 'extern "C" int trial() { __builtin_trap(); }'
    return script(
        tmp_path_factory.mktemp("crashing") / "g++",
        f"for last; do :; done\necho '{code}' | {SYSTEM} -x c++ - -shared -fPIC -o $last",
    )


@pytest.fixture
def configure() -> Iterator[Callable[[str], None]]:
    """Sets the compiler that torch is told to take, until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda path: stack.enter_context(config.patch({"cpp.cxx": (None, path)}))


def script(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_the_systems_compiler_is_not_tried(
    configure: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It and torch share a library; a trial would be lost time."""
    assert SYSTEM is not None
    configure(SYSTEM)
    monkeypatch.setattr("subprocess.run", None)
    assert working_compiler() == Compiler(SYSTEM)


def test_another_compiler_that_works_is_kept(
    configure: Callable[[str], None], tried: Tried, tmp_path: Path
) -> None:
    """What the user chose counts; it was tried."""
    path = script(tmp_path / "mine", f'exec {SYSTEM} "$@"')
    configure(path)
    assert working_compiler() == Compiler(path)
    assert tried[path, os.environ.get("PATH")]


def test_one_whose_programs_crash_is_replaced(
    configure: Callable[[str], None], crashing: str
) -> None:
    """By the system's, and it is said."""
    configure(crashing)
    assert working_compiler() == Compiler(
        SYSTEM or "", f"compiled with {SYSTEM}: what {crashing} makes crashes beside torch"
    )


def test_what_was_found_without_an_assembler_is_not_kept(
    configure: Callable[[str], None],
    crashing: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Compilers find assembler and linker by PATH: with another, all is tried anew.

    Else a process that once had none would load programs that crash.
    """
    configure(crashing)
    compilers._choose.cache_clear()
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path / "empty"))
        assert working_compiler() == Compiler(crashing)
    assert working_compiler().path == SYSTEM


def test_where_none_works_the_configured_one_stays(
    configure: Callable[[str], None],
    crashing: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Then the program itself is tried, and its error tells more."""
    configure(crashing)
    monkeypatch.setattr(os, "defpath", str(tmp_path / "system"))
    (tmp_path / "system").mkdir()
    shutil.copy(crashing, tmp_path / "system" / "g++")
    assert working_compiler() == Compiler(crashing)
