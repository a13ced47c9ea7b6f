"""Loops in C, for what is too fast to be timed from Python; compiled on this host when first used."""

import ctypes
import functools
import hashlib
import importlib.resources
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ridgeline.codec import cache_directory
from ridgeline.errors import MachineError

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11")
LIMIT_S = 60.0
SOURCES = ("shared.h", "memory.c", "sharing.c", "vectors.c")
"""Compiled as one, in this order."""
VECTOR_BITS = (32, 128, 256, 512)
"""Widths of vectors of 32-bit floats; the first is one float, as a loop has it that is not vectorised."""
_COUNT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[type[Any], ...]] = {
    "ridgeline_chase": (_POINTER, _COUNT),
    "ridgeline_read": (_POINTER, _COUNT, _COUNT),
    "ridgeline_stride": (_POINTER, *(_COUNT,) * 3),
    "ridgeline_draw": (_POINTER, *(_COUNT,) * 3, _POINTER),
    "ridgeline_count": (_POINTER, _POINTER, _COUNT, _COUNT, _POINTER),
    "ridgeline_additions": (_COUNT,),
}
"""What is in the library on every host, and what it takes; all return seconds."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loops through memory, from the cache where they were compiled before for this processor.

    Raises:
        MachineError: there is no C compiler, or it fails.

    Cost: a second, once a host.
    """
    loaded = _loaded("memory", SOURCES)
    for name, arguments in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, ctypes.c_double
    return loaded


@functools.cache
def storage_library() -> ctypes.CDLL:
    """The loop that reads blocks of a file, likewise.

    Raises:
        MachineError: there is no C compiler, or it fails.

    Cost: a second, once a host.
    """
    loaded = _loaded("storage", ("storage.c",))
    function = loaded.ridgeline_read_blocks
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (ctypes.c_int, address, number, address, number, ctypes.c_double, address)
    function.restype = number
    return loaded


def multiply_adds() -> dict[int, Callable[[int], float]]:
    """By bits of a vector: seconds of a number of multiply-adds of such vectors, a multiple of 48.

    Only widths in which the compiler makes instructions for this processor.

    Raises:
        MachineError: see `library`.
    """
    found: dict[int, Callable[[int], float]] = {}
    for bits in VECTOR_BITS:
        # The source leaves out widths that this processor has no instructions for.
        function = getattr(library(), f"ridgeline_multiply_add_{bits}", None)
        if function is not None:
            function.argtypes, function.restype = (_COUNT,), ctypes.c_double
            found[bits] = function
    return found


def _loaded(stem: str, sources: Sequence[str]) -> ctypes.CDLL:
    source = _joined(sources)
    compiler = _compiler()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=False, timeout=LIMIT_S
    ).stdout
    # All that the program depends on, as homes are shared between hosts.
    key = b"\0".join([source, version, " ".join(FLAGS).encode(), _processor()])
    path = cache_directory() / "native" / f"{stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    try:
        if not path.is_file():
            _compile(compiler, source, path)
        return ctypes.CDLL(str(path))
    # A cache that cannot be written, or whose programs may not run or are damaged, costs a compilation.
    except OSError:
        return _loaded_once(compiler, source)


def _loaded_once(compiler: str, source: bytes) -> ctypes.CDLL:
    """Compiled for this process alone."""
    try:
        with tempfile.TemporaryDirectory(prefix="ridgeline-native-") as folder:
            path = Path(folder) / "once.so"
            _compile(compiler, source, path)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise MachineError(
            f"wanted a place for the loops that time memory, got {error} also outside the cache; let "
            "XDG_CACHE_HOME or TMPDIR name a directory that can be written and run from"
        ) from error


def _joined(sources: Sequence[str]) -> bytes:
    folder = importlib.resources.files(__name__)
    parts = (
        f'#line 1 "{name}"\n'.encode() + folder.joinpath(name).read_bytes() for name in sources
    )
    return b"\n".join(parts)


def _compiler() -> str:
    named = os.environ.get("CC", "").split()[:1]
    found = next((path for path in map(shutil.which, (*named, *COMPILERS)) if path), None)
    if found is None:
        wanted = ", ".join((*named, *COMPILERS))
        raise MachineError(
            f"wanted a C compiler to time memory with, got none of {wanted} in PATH; install one (on Debian: "
            "apt install gcc) or name it in CC"
        )
    return found


def _compile(compiler: str, source: bytes, path: Path) -> None:
    """Compile into a file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "made.so"
        words = [compiler, *FLAGS, "-x", "c", "-", "-o", str(made)]
        done = subprocess.run(
            words, input=source, capture_output=True, check=False, timeout=LIMIT_S
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise MachineError(
                f"wanted to compile the loops that time memory with {compiler}, got status "
                f"{done.returncode}: {said[0] if said else 'no message'}; name another compiler in CC"
            )
        # Atomic within a folder, so that two processes that compile at once do no harm.
        made.replace(path)


def _processor() -> bytes:
    """What `-march=native` stands for on this host: programs of another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    # The first processor stands for all: `-march=native` asks the one that it runs on.
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "".join(first.get(name, "") for name in ("model name", "flags", "Features")).encode()
