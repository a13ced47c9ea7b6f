"""The values of workers that push together: kinds `dist_sync` and `dist_device_sync`.

Each worker serves a part of the keys. A push brings the sums of all workers to who serves a key, which adds
them up in the order of ranks, updates its part, and sends it to all: a reduce-scatter, an update, an
all-gather. So a pull reads the worker's own copy, and a worker may pull alone (to save a checkpoint, say).
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Held, Key
from ridgeline.runtime.kvstore.compression import KeyedCompression
from ridgeline.runtime.kvstore.state_files import of_keys, to_keys
from ridgeline.runtime.kvstore.updaters import Updater
from ridgeline.runtime.kvstore.values.held_values import HeldValues, apply
from ridgeline.runtime.kvstore.values.merging import merged
from ridgeline.runtime.kvstore.values.placement import (
    ValuePart,
    loads_of,
    part_of,
    placed,
    state_of_part,
    whole_state,
)
from ridgeline.runtime.kvstore.values.rows import push_rows, raise_where_failed
from ridgeline.workers.agree import bytes_of_group
from ridgeline.workers.attendance import Attendance
from ridgeline.workers.flat_collectives import all_gather, all_to_all_uneven

Parts = Mapping[Key, tuple[ValuePart, ...]]


class CollectiveShelf(HeldValues):
    """A copy of all values, and the updates of the parts that this worker serves.

    All workers make the same calls in the same order, but for reading `values`.

    Args:
        group: Of the workers, used by nothing else.
        device: Where sums are taken and sent from: a CPU with gloo, a GPU with NCCL.
        owns_group: Whether the group was made for this shelf.
        present: Knows what became of a worker that does not come.
    """

    is_collective = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        owns_group: bool,
        present: Attendance | None = None,
    ) -> None:
        super().__init__()
        self._present = present
        self._group = group
        self._owns_group = owns_group
        self._device = device
        self.rank = dist.get_rank(group)
        self.num_workers = dist.get_world_size(group)
        self._parts: dict[Key, tuple[ValuePart, ...]] = {}
        self._has_pushed = False

    def init(self, values: Mapping[Key, Tensor]) -> None:
        """Everybody gets what the first worker has.

        Raises:
            KVStoreError: the workers name other keys, shapes or types.
        """
        told = {key: Held(value.shape, value.dtype) for key, value in values.items()}
        with self._together("the init of a store"):
            self._agree("init", ", ".join(f"{key!r}: {held}" for key, held in told.items()))
            for key, value in values.items():
                copy = value.to(self._device, copy=True, memory_format=torch.contiguous_format)
                # As bytes: gloo does not take all types.
                data = copy.view(-1).view(torch.uint8)
                dist.broadcast(data, group=self._group, group_src=0)
                self.values[key] = copy
        self._place([*values])

    def collect(self, key: Key, values: Sequence[Tensor], *, borrows: bool = False) -> Tensor:
        """The sum of what this worker's devices push; in memory of its own unless it borrows."""
        return merged(values, self._device, borrows=borrows)

    def push(self, totals: Mapping[Key, Tensor]) -> None:
        """Work the sums of all workers into the values.

        Raises:
            KVStoreError: another worker pushes something else, or has it worked in otherwise.
            AbsentWorkerError: another worker does not come; names it.
        """
        keys = ", ".join(f"{'rows of ' if t.is_sparse else ''}{k!r}" for k, t in totals.items())
        with self._together("a push to a store"):
            # Sums of keys in another order would be taken for each other's, and who serves a key updates it
            # for all.
            same = "; make the same calls with the same settings, in the same order, on all workers"
            self._agree("push", f"{keys}{self._how()}", same)
            self.exchange(totals)

    def exchange(self, totals: Mapping[Key, Tensor]) -> None:
        """Push what all workers are known to push alike."""
        self._has_pushed = True
        sparse = [key for key, total in totals.items() if total.is_sparse]
        dense = [key for key in totals if key not in sparse]
        # A type at a time: what goes to a worker is one flat tensor. By first occurrence, alike on all
        # workers.
        for dtype in dict.fromkeys(totals[key].dtype for key in dense):
            self._push_dense({key: totals[key] for key in dense if totals[key].dtype == dtype})
        for key in sparse:
            values, parts = self.values[key], self._parts[key]
            push_rows(key, totals[key], values, parts, self.updater, self._group)

    def set_updater(self, updater: Updater) -> None:
        """From the next push on; where it needs whole values, these are placed again.

        Raises:
            KVStoreError: parts were pushed to already, so that what is remembered of them would be lost.
        """
        if not updater.by_element and any(len(parts) > 1 for parts in self._parts.values()):
            if self._has_pushed:
                raise KVStoreError(
                    "wanted an updater that takes parts of a value, since large values are divided among the "
                    "workers and were pushed to, got one that needs them whole; set it before the first push"
                )
            self.updater = updater
            keys = [*self._parts]
            self._parts.clear()
            self._place(keys)
        self.updater = updater

    def optimizer_states(self) -> dict[Key, dict[str, Tensor]]:
        """What the updaters of all workers remember, put together, on the first worker; {} on others."""
        mine = {} if self.updater is None else self.updater.state()
        # On all workers, also those that need nothing: it is a collective.
        with self._together("the saving of optimizer states"):
            told = bytes_of_group(save(of_keys(mine)), self._group, self._device)
        if self.rank:
            return {}
        found = [to_keys(load(one)) for one in told]
        return {
            key: whole_state([found[part.place].get(key, {}) for part in parts])
            for key, parts in self._parts.items()
            if any(key in state for state in found)
        }

    def load_optimizer_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Have the updater remember what of this is for the parts of this worker.

        Raises:
            KVStoreError: there is no updater.
        """
        updater = self.optimizer()
        for key, part in self._mine(self._parts):
            shape = self.values[key].shape
            state = {
                name: state_of_part(tensor, part, shape)
                for name, tensor in states.get(key, {}).items()
            }
            if state:
                updater.load_state(key, {n: t.to(self._device) for n, t in state.items()})

    def barrier(self) -> None:
        """Return once all workers have called this."""
        with self._together("a barrier of a store"):
            bytes_of_group(b"", self._group, self._device)

    def close(self) -> None:
        """Leave the group that was made for this."""
        if self._owns_group:
            if self._present is not None:
                self._present.close()
            dist.destroy_process_group(self._group)

    def _push_dense(self, totals: Mapping[Key, Tensor]) -> None:
        parts = {key: self._parts[key] for key in totals}
        received = self._brought(totals, parts)
        failed: KVStoreError | None = None
        for key, part in self._mine(parts):
            # By rank, so that the sum has the same bits on whichever worker serves the key.
            total = merged([next(one) for one in received], self._device)
            mine = part_of(self.values[key], part)
            try:
                apply(self.updater, key, total.view(mine.shape), mine)
            except KVStoreError as error:
                failed = error  # the others wait for the outcome, of this too
        who = self._tell(parts, has_failed=failed is not None)
        if failed is not None:
            raise failed
        raise_where_failed(who, [*totals])

    def _brought(self, totals: Mapping[Key, Tensor], parts: Parts) -> list[Iterator[Tensor]]:
        """For each worker, what it brings for this one's parts: one flat tensor after the other."""
        like = next(iter(totals.values()))
        codec = self.compression if like.is_floating_point() else None
        # For workers that serve none of these keys: `cat` refuses an empty list.
        empty = like.new_empty(0, dtype=None if codec is None else torch.uint8)
        sends = [
            torch.cat([empty, *self._sent(totals, self._of(parts, place), codec)])
            for place in range(self.num_workers)
        ]
        sizes = [part_of(self.values[key], part).numel() for key, part in self._mine(parts)]
        lengths = sizes if codec is None else [*map(codec.num_bytes, sizes)]
        found = all_to_all_uneven(sends, [sum(lengths)] * self.num_workers, self._group)
        pieces = [one.split(lengths) if lengths else () for one in found]
        if codec is None:
            return [iter(one) for one in pieces]
        return [map(codec.decode, one, sizes) for one in pieces]

    def _sent(
        self,
        totals: Mapping[Key, Tensor],
        placed_there: Iterable[tuple[Key, ValuePart]],
        codec: KeyedCompression | None,
    ) -> Iterator[Tensor]:
        """What goes to one worker."""
        for key, part in placed_there:
            piece = part_of(totals[key], part).reshape(-1)
            yield piece if codec is None else codec.encode((key, part.start), piece)

    def _tell(self, parts: Parts, *, has_failed: bool) -> list[int]:
        """Bring everybody's copy up to date with what each worker serves; who says that an update failed."""
        like = self.values[next(iter(parts))]
        views = [
            [part_of(self.values[key], part) for key, part in self._of(parts, place)]
            for place in range(self.num_workers)
        ]
        # Beside the values, so that a failed update needs no collective of its own.
        flag = like.new_full((1,), has_failed)
        mine = torch.cat([flag, *(view.reshape(-1) for view in views[self.rank])])
        sizes = [[1, *(view.numel() for view in one)] for one in views]
        found = all_to_all_uneven(
            [mine] * self.num_workers, [sum(one) for one in sizes], self._group
        )
        who = []
        for place, one in enumerate(found):
            flag, *told = one.split(sizes[place])
            if flag.item():
                who.append(place)
            for view, value in zip(views[place], told, strict=True):
                if place != self.rank:
                    view.copy_(value.view(view.shape))
        return who

    def _of(self, parts: Parts, place: int) -> Iterator[tuple[Key, ValuePart]]:
        return ((key, part) for key, all_ in parts.items() for part in all_ if part.place == place)

    def _mine(self, parts: Parts) -> Iterator[tuple[Key, ValuePart]]:
        return self._of(parts, self.rank)

    def _place(self, keys: Sequence[Key]) -> None:
        shapes = {key: value.shape for key, value in self.values.items()}
        loads = loads_of(self._parts, shapes, self.num_workers)
        # Else an updater has to see the whole value, on one worker.
        divides = self.updater is None or self.updater.by_element
        self._parts |= placed({key: shapes[key] for key in keys}, loads, divides=divides)

    def _together(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._present is None else self._present.meeting(what)

    def _how(self) -> str:
        """What becomes of sums here, in words that are the same on all workers where it is."""
        parts = [] if self.updater is None else [self.updater.description()]
        if self.compression is not None:
            parts.append(f"in {self.compression.name} {self.compression.options}")
        return "".join(f" {part}" for part in parts)

    def _agree(self, call: str, said: str, advice: str = "") -> None:
        """See that all workers make the same call.

        Raises:
            KVStoreError: on all of them, with the first that makes another one than worker 0.
        """
        # Codes first: they are short, and nearly always all the same.
        code = torch.tensor([crc32(said.encode())], device=self._device)
        codes = code.new_empty(self.num_workers)
        all_gather(codes, code, self._group)
        if bool((codes == code).all()):
            return
        heard = [one.decode() for one in bytes_of_group(said.encode(), self._group, self._device)]
        other = next(rank for rank, one in enumerate(heard) if one != heard[0])
        raise KVStoreError(
            f"wanted the same {call} on all workers, got on worker 0: {heard[0]}; on worker {other}: "
            f"{heard[other]}{advice}"
        )
