"""The compiler for kernels: where it is looked for, and what is said where it is not there or refuses."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.errors import MachineError
from ridgeline.probe.gpu_memory import gpu_kernels
from ridgeline.probe.gpu_memory.gpu_kernels import compiled, library_names, nvrtc


class Compiler:
    """Stands in for NVRTC: its functions write where the pointers that they are given point."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses, self.options, self.destroyed = refuses, [], 0

    @property
    def library(self) -> Any:
        """With the names that NVRTC has."""
        functions = {
            "CreateProgram": self.create,
            "CompileProgram": self.compile,
            "GetProgramLogSize": self.log_size,
            "GetProgramLog": self.log,
            "GetCUBINSize": self.size,
            "GetCUBIN": self.program,
            "DestroyProgram": self.destroy,
            "GetErrorString": lambda status: b"NVRTC_ERROR_COMPILATION",
        }
        return SimpleNamespace(**{f"nvrtc{name}": one for name, one in functions.items()})

    def create(self, program: Any, source: bytes, name: bytes, *rest: object) -> int:
        assert (source, name, rest) == (b"source", b"levels.cu", (0, None, None))
        return 0

    def compile(self, program: Any, count: int, options: Any) -> int:
        self.options = list(options[:count])
        return 6 if self.refuses else 0

    def log_size(self, program: Any, size: Any) -> int:
        size._obj.value = 40
        return 0

    def log(self, program: Any, text: Any) -> int:
        text.value = b"levels.cu(3): error: no such thing\nmore"
        return 0

    def size(self, program: Any, size: Any) -> int:
        size._obj.value = 5
        return 0

    def program(self, program: Any, text: Any) -> int:
        text.raw = b"\x7fEL\x00F"
        return 0

    def destroy(self, program: Any) -> int:
        self.destroyed += 1
        return 0


def test_a_program_comes_back_whole() -> None:
    """Also behind a byte that is 0; for the architecture that was asked for."""
    compiler = Compiler(refuses=False)
    assert compiled(compiler.library, b"source", "sm_90") == b"\x7fEL\x00F"
    assert compiler.options == [b"--gpu-architecture=sm_90"]
    assert compiler.destroyed == 1


def test_a_refusal_says_what_the_compiler_said() -> None:
    """Its first line; the program is destroyed all the same."""
    compiler = Compiler(refuses=True)
    with pytest.raises(MachineError) as raised:
        compiled(compiler.library, b"source", "sm_90")
    assert str(raised.value) == (
        "wanted to compile levels.cu for sm_90, got status 6 of NVRTC: levels.cu(3): error: no such thing; use a build "
        "of torch for this GPU"
    )
    assert compiler.destroyed == 1


def test_the_compiler_is_looked_for_beside_torch_first(tmp_path: Path) -> None:
    """Of the major version that torch was built for; then wherever the system looks."""
    for folder in ("nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib", "torch/lib"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libnvrtc.so.12").touch()
    (tmp_path / "torch/lib/libnvrtc.so.13").touch()
    assert library_names("12.8", tmp_path) == [
        f"{tmp_path}/nvidia/cu13/lib/libnvrtc.so.12",
        f"{tmp_path}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        f"{tmp_path}/torch/lib/libnvrtc.so.12",
        "libnvrtc.so.12",
    ]


def test_a_build_without_cuda_and_a_compiler_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each says what to install."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MachineError) as raised:
        nvrtc()
    assert str(raised.value) == (
        f"wanted NVRTC to compile kernels with, got torch {torch.__version__}, which was not built for CUDA; install a "
        "build for CUDA"
    )

    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(gpu_kernels, "library_names", lambda version, packages: ["libnvrtc.so.12"])
    monkeypatch.setattr(gpu_kernels.ctypes, "CDLL", missing)
    with pytest.raises(MachineError) as raised:
        nvrtc()
    assert str(raised.value) == (
        "wanted NVRTC of CUDA 12.8 to compile kernels with, got none of libnvrtc.so.12; install the package "
        "nvidia-cuda-nvrtc of that version, or add its folder to LD_LIBRARY_PATH"
    )
