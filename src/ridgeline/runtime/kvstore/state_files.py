"""What updaters remember, in a file: tensors by key and name, in the format of safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ridgeline.codec import write_atomically
from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Key

States = Mapping[Key, Mapping[str, Tensor]]


def of_keys(states: Mapping[Any, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One dictionary of tensors, whose names hold the key with its type, or what else stands for one."""
    return {
        msgspec.json.encode([key, name]).decode(): tensor.detach().cpu().contiguous()
        for key, state in states.items()
        for name, tensor in state.items()
    }


def to_keys(tensors: Mapping[str, Tensor], kind: Any = int | str) -> dict[Any, dict[str, Tensor]]:
    """What `of_keys` was made of, by keys of a kind.

    Raises:
        msgspec.MsgspecError: a name is none that it makes.
    """
    found: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key, entry = msgspec.json.decode(name, type=tuple[kind, str])
        found.setdefault(key, {})[entry] = tensor
    return found


def write_states(path: Path, states: States) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        KVStoreError: the file cannot be written.
    """
    try:
        write_atomically(path, save(of_keys(states)))
    except OSError as error:
        raise KVStoreError(
            f"wanted to write optimizer states to {path}, got {error.strerror or error}; name a folder that "
            "exists and has room"
        ) from error


def read_states(path: Path) -> dict[Key, dict[str, Tensor]]:
    """Read a file that `write_states` made.

    Raises:
        KVStoreError: there is none, or it is damaged or of another kind.
    """
    try:
        return to_keys(load(path.read_bytes()))
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise KVStoreError(
            f"wanted optimizer states that a store saved in {path}, got {type(error).__name__}: {error}"
        ) from error
