"""Which C++ compiler makes programs that run beside torch.

Packaged programs take names of devices apart with regular expressions of the C++ library. A compiler that is
not the system's (set by CXX, or part of a Python distribution) may come with another version of that library
than the one in the process; what it compiles then crashes. So such a compiler is tried first.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from torch._inductor import config

from ridgeline.errors import CaptureError

TRIAL_LIMIT_S = 120.0
"""A trial compiles a few lines and imports torch: some 5 s, more on a busy machine."""
SOURCE = """
#include <regex>
#include <string>
extern "C" int trial() {
  static const std::regex pattern("([a-z]+)(?::([0-9]+))?");
  std::smatch match;
  const std::string name("cuda:7");
  return std::regex_match(name, match, pattern) && match[2].str() == "7" ? 0 : 1;
}
"""
_CALL = "import ctypes, sys, torch; sys.exit(ctypes.CDLL(sys.argv[1]).trial())"


class Compiler(NamedTuple):
    """A compiler's path, and why it is not the configured one; empty if it is."""

    path: str
    note: str = ""


def working_compiler() -> Compiler:
    """The configured compiler; if it is not the system's and what it makes crashes, the system's.

    Raises:
        CaptureError: there is none.

    Cost: Nothing where the system's compiler is configured. Else a trial of some seconds, once.
    """
    settings = config.cpp.cxx
    names = [name for name in (settings if isinstance(settings, tuple) else (settings,)) if name]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise CaptureError(
            f"wanted a C++ compiler to package a program, got none ({' or '.join(names)} is not on "
            "PATH); install one (apt install g++, or dnf install gcc-c++) or set CXX to its path"
        )
    # By `os.defpath`, where no activated environment has put a compiler of its own in front.
    return _choose(found, shutil.which("g++", path=os.defpath), os.environ.get("PATH"))


@functools.cache
def _choose(found: str, system: str | None, path: str | None) -> Compiler:
    """`path` is where compilers look for an assembler: without one none works, which says little of them."""
    if system is None or Path(found).resolve() == Path(system).resolve() or runs(found):
        return Compiler(found)
    if not runs(system):
        return Compiler(found)  # the program's own trial will say what happens
    return Compiler(system, f"compiled with {system}: what {found} makes crashes beside torch")


def runs(compiler: str) -> bool:
    """Whether a few lines compiled by it run in a process with torch.

    Cost: Seconds: compiles, and starts a child process.
    """
    with tempfile.TemporaryDirectory(prefix="ridgeline-compiler-") as directory:
        source, library = Path(directory) / "trial.cpp", Path(directory) / "trial.so"
        source.write_text(SOURCE)
        build = [compiler, "-shared", "-fPIC", "-std=c++17", str(source), "-o", str(library)]
        # In a child, as the crash that is looked for would be ours.
        call = [sys.executable, "-c", _CALL, str(library)]
        return all(_succeeds(command) for command in (build, call))


def _succeeds(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
