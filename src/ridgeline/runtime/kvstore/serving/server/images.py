"""A shard as tensors and facts, and back: what a snapshot holds. One file in the format of safetensors.

It holds, of each slice, the value, what its optimizer remembers, whose pushes are in it and which wait for
their round; and who was there, and how sums are worked in. What connections were answered is not in it: those
of another server begin again, and pushes have numbers of their own.
"""

from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.errors import KVStoreError, first_line
from ridgeline.runtime.checkpoints.checkpoint_directory import flush
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.server.shard import Shard
from ridgeline.runtime.kvstore.serving.server.slots import Slice
from ridgeline.runtime.kvstore.serving.wire import ValueSlot
from ridgeline.runtime.kvstore.updaters import SetOptimizer
from ridgeline.tensors.row_sums import rows_tensor

_FACTS = "facts"


class _Slice(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    slot: ValueSlot
    rounds: dict[int, int]
    taken: dict[int, int]
    waiting: dict[int, int]
    """How many pushes of each worker."""
    since: dict[int, int] = {}


class _Facts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    number: int
    staleness: int | None
    present: list[int]
    updates_by: SetOptimizer | wire.SetUpdater | None
    slices: list[_Slice]


class Image(NamedTuple):
    """A shard as it was at one moment.

    Attributes:
        number: Of the snapshot.
        tensors: Copies, by name.
    """

    number: int
    tensors: dict[str, Tensor]


def image_of(shard: Shard, number: int) -> Image:
    """A copy of all that a shard holds.

    Raises:
        KVStoreError: an optimizer keeps something that is no tensor.
    """
    slots, tensors, slices = shard.slots, dict[str, Tensor](), list[_Slice]()
    for place, (slot, one) in enumerate(slots.slices.items()):
        # By the place in the list of slices, as keys may hold any character.
        tensors[f"{place} value"] = one.value.clone()
        state = one.updater.state().get(slot.key, {}) if one.updater is not None else {}
        for name, tensor in state.items():
            tensors[f"{place} state {name}"] = tensor.detach().clone().contiguous()
        for worker, totals in one.waiting.items():
            for count, total in enumerate(totals):
                _add_waiting(tensors, f"{place} waiting {worker} {count}", total)
        waiting = {worker: len(totals) for worker, totals in one.waiting.items()}
        facts_of = dict(one.rounds), dict(one.taken), waiting, dict(one.since)
        slices.append(_Slice(slot, *facts_of))
    updates_by = shard.actions.updates_by
    facts = _Facts(number, slots.staleness, sorted(slots.present), updates_by, slices)
    # Not as JSON: settings may be infinite.
    packed = bytearray(msgspec.msgpack.encode(facts))
    tensors[_FACTS] = torch.frombuffer(packed, dtype=torch.uint8)
    return Image(number, tensors)


def write_image(image: Image, path: Path) -> None:
    """Write a file that is there whole or not at all, also when the power fails.

    Raises:
        OSError: the file cannot be written.
        SafetensorError: likewise.
    """
    # Another ending, so that none of those who look for snapshots takes it for one.
    part = path.with_suffix(".part")
    try:
        save_file(image.tensors, part)
        flush(part)
        part.replace(path)
        # The name as well: a rename is in the directory, which reaches the disk by itself only later.
        flush(path.parent)
    finally:
        part.unlink(missing_ok=True)


def read_image(path: Path) -> Image:
    """What `write_image` has written.

    Raises:
        KVStoreError: the file is damaged, or none of these.
    """
    try:
        tensors = load_file(path)
        return Image(_facts(tensors).number, tensors)
    except (OSError, SafetensorError, KeyError, msgspec.MsgspecError) as error:
        raise KVStoreError(
            f"wanted a snapshot of a server in {path}, got {type(error).__name__}: {first_line(error)}"
        ) from error


def restore(shard: Shard, image: Image) -> None:
    """Have an empty shard hold what an image holds, and await the workers who were there.

    Raises:
        KVStoreError: it is of a server with another staleness, or of an updater that is not registered here.
    """
    tensors = image.tensors
    facts = _facts(tensors)
    if facts.staleness != shard.slots.staleness:
        raise KVStoreError(
            f"wanted a snapshot of a server with staleness {shard.slots.staleness}, got one of "
            f"{facts.staleness}; name another folder"
        )
    # Before the slices, which get their updaters when they are made.
    if facts.updates_by is not None:
        shard.actions.do(0, facts.updates_by, ())
    for place, one in enumerate(facts.slices):
        value = tensors[f"{place} value"]
        shard.slots.init(one.slot, value)
        _fill(shard.slots.slices[one.slot], one, place, tensors)
    if facts.present:
        shard.slots.present = set(facts.present)
    shard.awaits = set(facts.present)


def _facts(tensors: dict[str, Tensor]) -> _Facts:
    return msgspec.msgpack.decode(tensors[_FACTS].numpy().tobytes(), type=_Facts)


def _fill(held: Slice, one: _Slice, place: int, tensors: dict[str, Tensor]) -> None:
    prefix = f"{place} state "
    state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    if state and held.updater is not None:
        held.updater.load_state(one.slot.key, state)
    held.rounds.update(one.rounds)
    held.taken.update(one.taken)
    held.since.update(one.since)
    for worker, count in one.waiting.items():
        names = [f"{place} waiting {worker} {number}" for number in range(count)]
        held.waiting[worker] = deque(_waiting(tensors, name, held.value) for name in names)


def _add_waiting(tensors: dict[str, Tensor], name: str, total: Tensor) -> None:
    """Those that wait are not changed: they need no copy."""
    if total.is_sparse:
        rows = total.coalesce()
        tensors[f"{name} numbers"] = rows.indices()[0].contiguous()
        tensors[f"{name} rows"] = rows.values().contiguous()
    else:
        tensors[name] = total.contiguous()


def _waiting(tensors: dict[str, Tensor], name: str, value: Tensor) -> Tensor:
    if name in tensors:
        return tensors[name]
    return rows_tensor(tensors[f"{name} numbers"], tensors[f"{name} rows"], value.shape)
