"""Loops for a GPU that torch has no operators for, compiled by the compiler that torch ships (NVRTC).

No CUDA toolkit is needed: kernels include no header, and the compiler is a library beside torch's own.
"""

import ctypes
import functools
import importlib.resources
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _utils as loader

from ridgeline.errors import MachineError

SOURCE = "levels.cu"
NAMES = (
    "ridgeline_chase",
    "ridgeline_read_levels",
    "ridgeline_multiply_adds",
    "ridgeline_read_shared",
)
FOLDERS = ("nvidia/*/lib", "torch/lib")
"""Where builds of torch keep the libraries of CUDA, beside torch's own folder."""
Kernel = Callable[..., None]
"""Called with `grid`, `block` and `args`: tensors on the GPU, and whole numbers of 32 bits."""


@functools.cache
def kernels() -> dict[str, Kernel]:
    """The loops by name, for the current GPU.

    Raises:
        MachineError: NVRTC is not to be found, refuses the source, or torch cannot load what it made.

    Cost: a second, once a process; makes a context on the GPU.
    """
    major, minor = torch.cuda.get_device_capability()
    source = importlib.resources.files("ridgeline.probe.native").joinpath(SOURCE).read_bytes()
    program = compiled(nvrtc(), source, f"sm_{major}{minor}")
    # By name, since it is private to torch, and may go with any release.
    load: Callable[..., Any] | None = getattr(loader, "_cuda_load_module", None)
    if load is None:
        raise MachineError(
            f"wanted to load kernels with torch.cuda._utils._cuda_load_module, got torch {torch.__version__} "
            "without it; install 2.9 or later"
        )
    try:
        return load(program, list(NAMES))
    except (RuntimeError, OSError) as error:
        raise MachineError(
            f"wanted to load kernels for sm_{major}{minor}, got: {error}; update the GPU's driver"
        ) from error


def compiled(library: ctypes.CDLL, source: bytes, architecture: str) -> bytes:
    """A source as a program for one architecture of GPUs.

    The source is CUDA C++ that includes nothing; an architecture is such as `sm_90`.

    Raises:
        MachineError: the compiler refuses it; the first line of what it says is in the message.
    """
    program = ctypes.c_void_p()
    made = library.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.encode(), 0, None, None)
    _check(library, made, architecture, "")
    # Programs of NVRTC live outside of Python's memory.
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        done = library.nvrtcCompileProgram(program, 1, options)
        _check(library, done, architecture, _log(library, program) if done else "")
        size = ctypes.c_size_t()
        told = library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        _check(library, told, architecture, "")
        text = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, text), architecture, "")
        return text.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def nvrtc() -> ctypes.CDLL:
    """The compiler of the CUDA version that torch was built for.

    Raises:
        MachineError: it is not to be found.
    """
    version = torch.version.cuda
    if version is None:
        raise MachineError(
            f"wanted NVRTC to compile kernels with, got torch {torch.__version__}, which was not built for "
            "CUDA; install a build for CUDA"
        )
    names = library_names(version, Path(torch.__file__).parents[1])
    # Torch's own first: another version may refuse this GPU's architecture.
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:  # not there, or not for this processor: another one may be
            continue
    raise MachineError(
        f"wanted NVRTC of CUDA {version} to compile kernels with, got none of {', '.join(names)}; install "
        "the package nvidia-cuda-nvrtc of that version, or add its folder to LD_LIBRARY_PATH"
    )


def library_names(version: str, packages: Path) -> list[str]:
    """Under which names NVRTC may be found, likeliest first.

    The version is that of CUDA, such as `12.8`; `packages` is the folder that torch's own is in.
    """
    name = f"libnvrtc.so.{version.partition('.')[0]}"
    found = (str(path) for folder in FOLDERS for path in sorted(packages.glob(f"{folder}/{name}")))
    return [*found, name]


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(max(1, size.value))
    library.nvrtcGetProgramLog(program, text)
    lines: Sequence[str] = text.value.decode(errors="replace").strip().splitlines()
    return lines[0] if lines else "no message"


def _check(library: ctypes.CDLL, status: int, architecture: str, said: str) -> None:
    if not status:
        return
    told: Callable[[int], bytes] = library.nvrtcGetErrorString
    # ctypes takes results for numbers unless told otherwise, which would cut the address.
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    reason = said or told(status).decode(errors="replace")
    raise MachineError(
        f"wanted to compile {SOURCE} for {architecture}, got status {status} of NVRTC: {reason}; use a build "
        "of torch for this GPU"
    )
