"""Compiled programs that are kept for later processes: what a start has compiled, the next one loads.

Packages are compiled ahead of time, which takes the C++ compiler a minute or more, and torch keeps nothing of
it. A program is found again by all that its code follows from: its graph with shapes, layouts and types of
every value, its constants, the compiler's settings, the versions and the machine. Loading one checks it
as a new one. Files lie in `$XDG_CACHE_HOME/ridgeline/programs` (default `~/.cache`).
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ridgeline.codec import cache_directory, write_atomically
from ridgeline.packages.host import describe_host
from ridgeline.tensors.nests import tensors_in

MOST_BYTES = 1 << 30
"""Of all kept programs; the longest unused go first."""


def key_of(program: ExportedProgram, settings: Mapping[str, Any]) -> str | None:
    """A digest of all that the code of a program follows from; None where that is unknown.

    Nor is there one where the compiler's own caches are off, as by `TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`.

    Args:
        program: What is compiled.
        settings: The compiler's, beside those that are set for the process.

    Cost: Reads the program's constants.
    """
    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    held = {**program.state_dict, **program.constants}
    # `_identity` reads the outer graph only; what it does not see must not be taken for equal.
    nested = any(isinstance(m, fx.GraphModule) for m in [*program.graph_module.modules()][1:])
    are_read = all(isinstance(t, Tensor) and t.layout is torch.strided for t in held.values())
    if nested or program.range_constraints or not are_read:
        return None
    digest = hashlib.sha256()
    for text in _identity(program, settings):
        digest.update(text.encode() + b"\0")
    for name, tensor in sorted(held.items()):
        digest.update(f"{name} {_form(tensor)}".encode())
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        digest.update(dense.view(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    return digest.hexdigest()


def recall(key: str, path: Path) -> bool:
    """Put a kept program at a path; whether there is one, undamaged.

    Cost: Reads and copies it.
    """
    for kept in _directory().glob(f"{key}-*.pt2"):
        with contextlib.suppress(OSError):
            # A file that was cut short or changed has another digest than its name says.
            if _name(key, kept) == kept.name:
                # Marks its use: the longest unused go first, by this time.
                os.utime(kept)
                shutil.copyfile(kept, path)
                return True
            kept.unlink()
    return False


def keep(key: str, path: Path) -> None:
    """Keep a program, where the directory can be written; else it is compiled again by the next start."""
    with contextlib.suppress(OSError):
        write_atomically(_directory() / _name(key, path), path.read_bytes())
        _forget_oldest(_directory())


def _directory() -> Path:
    return cache_directory() / "programs"


def _name(key: str, path: Path) -> str:
    """Of the file that holds what lies at a path: its own digest is part of it."""
    with path.open("rb") as file:
        return f"{key}-{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}.pt2"


def _forget_oldest(directory: Path) -> None:
    files = [(p.stat().st_mtime, p.stat().st_size, p) for p in directory.glob("*.pt2")]
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)


def _identity(program: ExportedProgram, settings: Mapping[str, Any]) -> Iterator[str]:
    """Everything but the constants, as texts."""
    values = (t for node in program.graph.nodes for t in tensors_in(node.meta.get("val")))
    device = next((t.device for t in values), torch.device("cpu"))
    yield repr(describe_host(device))
    yield repr(torch.version.git_version)
    yield repr(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    yield repr(sorted(settings.items()))
    yield repr(sorted(config.save_config_portable().items(), key=lambda item: item[0]))
    yield repr((torch.get_num_threads(), torch.get_default_dtype()))
    yield repr((torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()))
    yield repr(program.graph_signature)
    yield repr((program.call_spec.in_spec, program.call_spec.out_spec))
    for node in program.graph.nodes:
        yield f"{node.format_node()} {pytree.tree_map_only(Tensor, _form, node.meta.get('val'))!r}"


def _form(tensor: Tensor) -> str:
    """All of a tensor but its values."""
    return (
        f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {tensor.dtype} {tensor.device} "
        f"{tensor.layout} {tensor.requires_grad} {tensor.is_conj()} {tensor.is_neg()}"
    )
