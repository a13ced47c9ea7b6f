"""The tensors of a checkpoint's folder: safetensors files, written and read by torch.distributed.checkpoint.

`dcp.save`, `dcp.async_save` and `dcp.load` make the calls that are made here, through the same planners,
writer and reader. They are not called themselves, for three reasons (torch 2.11 to 2.13). They are collective
unless told otherwise, and a thread beside training must not start collectives; told so, they warn in every
process without a group, and `async_save` refuses a job whose only backend is NCCL. They wrap OSError, which
says what is wrong with the disk. And a checkpoint becomes durable, hashed and named behind their last call.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

FILE_BYTES = 16 << 20
"""Tensors that share a file, at most, unless one alone is larger, or there were more than `MOST_FILES`.

safetensors makes the bytes of a file as one, in memory, and no other thread runs Python meanwhile: about 1 ms
for 2 MB (`benchmarks/checkpoint_pause.py`). So this bounds how long training waits for the writing thread.
"""
MOST_FILES = 256
"""Of a folder, about."""


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Make a folder of tensors, with the index that readers of several files want.

    Args:
        folder: Not there yet.
        tensors: On the CPU, by name; they may be laid out in any way, and share memory.

    Raises:
        OSError: the disk is full or refuses.

    Cost: A copy of what is not contiguous or shares memory, and one of the tensors of a file at a time.
    """
    # Also for no tensors: who reads the checkpoint lists both folders.
    folder.mkdir()
    if not tensors:
        return
    held = _apart(tensors)
    sizes = {name: tensor.nbytes for name, tensor in held.items()}
    most_bytes = max(FILE_BYTES, sum(sizes.values()) // MOST_FILES)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files_of(sizes, most_bytes))
    # The tensors are on the host already; copying ahead would synchronise a CUDA stream from this thread.
    writer.per_thread_copy_ahead = 0
    planner = DefaultSavePlanner()
    # Each reader and writer coordinates itself: nobody else takes part.
    planner.set_up_planner(held, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(planner.create_local_plan())]
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, each in its own memory; the caller has verified the files.

    Cost: Reads every file.
    """
    reader = HuggingFaceStorageReader(str(folder))
    metadata = reader.read_metadata()
    tensors: dict[str, Tensor] = {}
    for name, held in metadata.state_dict_metadata.items():
        assert isinstance(held, TensorStorageMetadata), f"safetensors hold tensors, got {held}"
        tensors[name] = torch.empty(held.size, dtype=held.properties.dtype, device="cpu")
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(reader.prepare_global_plan(plans)[0])
    reader.read_data(plan, planner).wait()
    return tensors


def tensor_files(folder: Path) -> list[Path]:
    """The files of a folder that hold tensors."""
    return sorted(folder.rglob("*.safetensors"))


def files_of(sizes: Mapping[str, int], most_bytes: int) -> dict[str, int]:
    """Number of the file that each tensor goes to, from 1, in the order of the tensors.

    Args:
        sizes: Bytes by name.
        most_bytes: That a file has, unless one tensor has more.
    """
    files: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > most_bytes:
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    return files


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, contiguous and without common memory, as files hold them."""
    held: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        # safetensors refuses tensors that share memory, such as tied weights.
        address = own.untyped_storage().data_ptr()
        held[name] = own.clone() if address in taken else own
        # Empty tensors all have address 0, and share nothing.
        if own.numel():
            taken.add(address)
    return held
