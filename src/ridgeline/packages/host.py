"""What a compiled program needs of the machine that runs it, and whether this machine has it.

Native code fits one operating system, one processor family with the instructions that the compiler used,
one generation of GPU, and the torch it was compiled against: AOTInductor's interface holds within a
minor version only.
"""

import platform
import sys
from pathlib import Path

import torch

from ridgeline.codec import VERSION, Value

_INSTRUCTION_SETS = (
    "abm", "adx", "amx", "avx", "bmi", "f16c", "fma", "gfni", "movbe", "popcnt", "sse4_1", "sse4_2", "ssse3",
    "vaes", "vpclmulqdq",
)  # fmt: skip
"""Beginnings of the x86 processor flags that stand for instructions a compiler may emit."""


class NativeHost(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine as native code sees it.

    Args:
        platform: Operating system and processor family, such as `linux x86_64`.
        capability: What torch calls the instruction set of the processor (`AVX2`, `AVX512`, `DEFAULT`),
            or the generation of the GPU (`sm_90`).
        instructions: Processor flags that stand for instructions which a compiler may have used; empty
            where the operating system does not say.
        versions: Of torch, ridgeline, and cuda (empty without).
    """

    platform: str
    capability: str
    instructions: tuple[str, ...] = ()
    versions: dict[str, str]


def describe_host(device: torch.device) -> NativeHost:
    """This machine, for programs that run on `device` (there must be one of that kind)."""
    return NativeHost(
        platform=f"{sys.platform} {platform.machine()}",
        capability=_capability(device),
        instructions=_instructions(),
        versions={
            "torch": str(torch.__version__),
            "ridgeline": VERSION,
            "cuda": torch.version.cuda or "",
        },
    )


def unmet(wanted: NativeHost, got: NativeHost, device: str) -> tuple[str, str] | None:
    """What a program made on `wanted` asks for and `got` lacks, as texts; None if it runs there.

    Args:
        wanted: The machine that made the program.
        got: The machine that is to run it; described for the same kind of device.
        device: `cpu` or `cuda`.
    """
    if wanted.platform != got.platform:
        return f"platform {wanted.platform}", got.platform
    torch_wanted, torch_got = _minor(wanted.versions["torch"]), _minor(got.versions["torch"])
    if torch_wanted != torch_got:
        return f"torch {torch_wanted}", f"torch {got.versions['torch']}"
    # More instructions than wanted do no harm; capability names would refuse a newer processor.
    lacking = [name for name in wanted.instructions if name not in got.instructions]
    if lacking and got.instructions:
        return f"a processor with {', '.join(lacking)}", "one without"
    if device == "cuda":
        # Within a major version CUDA's libraries keep their interface.
        cuda_wanted, cuda_got = (h.versions["cuda"].partition(".")[0] for h in (wanted, got))
        if cuda_wanted != cuda_got:
            return f"CUDA {cuda_wanted}", f"CUDA {got.versions['cuda']}"
    if wanted.capability != got.capability and (device == "cuda" or not got.instructions):
        what = "a GPU" if device == "cuda" else "a processor"
        return f"{what} of {wanted.capability}", got.capability
    return None


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _capability(device: torch.device) -> str:
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return torch.backends.cpu.get_cpu_capability()


def _instructions() -> tuple[str, ...]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() == "flags":
            return tuple(sorted(f for f in flags.split() if f.startswith(_INSTRUCTION_SETS)))
        if name.strip() == "Features":  # ARM: all of them are instructions
            return tuple(sorted(flags.split()))
    return ()
