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
from pathlib import Path

from ridgeline.codec import cache_directory
from ridgeline.errors import MachineError

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11")
LIMIT_S = 60.0


@functools.cache
def library() -> ctypes.CDLL:
    """The loops through memory, from the cache where they were compiled before for this processor.

    Raises:
        MachineError: there is no C compiler, or it fails.

    Cost: a second, once a host.
    """
    loaded = _loaded("memory")
    for name, arguments in (
        ("ridgeline_chase", (ctypes.c_void_p, ctypes.c_int64)),
        ("ridgeline_read", (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)),
        ("ridgeline_stride", (ctypes.c_void_p, *(ctypes.c_int64,) * 3)),
    ):
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
    loaded = _loaded("storage")
    function = loaded.ridgeline_read_blocks
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (ctypes.c_int, address, number, address, number, ctypes.c_double, address)
    function.restype = number
    return loaded


def _loaded(stem: str) -> ctypes.CDLL:
    source = importlib.resources.files(__name__).joinpath(f"{stem}.c").read_bytes()
    compiler = _compiler()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=False, timeout=LIMIT_S
    ).stdout
    key = b"\0".join([source, version, " ".join(FLAGS).encode(), _processor()])
    path = cache_directory() / "native" / f"{stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not path.is_file():
        _compile(compiler, source, path)
    return ctypes.CDLL(str(path))


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
        made.replace(path)


def _processor() -> bytes:
    """What `-march=native` stands for on this host: programs of another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "".join(first.get(name, "") for name in ("model name", "flags", "Features")).encode()
