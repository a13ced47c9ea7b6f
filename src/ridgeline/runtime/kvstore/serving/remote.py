"""The values of servers, as a worker sees them: kind `dist_async`."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import zmq
from safetensors.torch import load, save
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Held, Key
from ridgeline.runtime.kvstore.compression import Compression
from ridgeline.runtime.kvstore.merging import merged
from ridgeline.runtime.kvstore.placement import Part, placed
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.beside import ServerBeside
from ridgeline.runtime.kvstore.serving.channel import Answered, Asked, Channel
from ridgeline.runtime.kvstore.serving.server import LEASE_S
from ridgeline.runtime.kvstore.serving.wire import Slot
from ridgeline.runtime.kvstore.updaters import FunctionUpdater, OptimizerUpdater, Updater

SLICE_BYTES = 4 << 20
"""Of a message. Source: BytePS, BYTEPS_PARTITION_BYTES; a server works one in while the next arrives."""
CPU = torch.device("cpu")


class Beating:
    """A thread that tells servers that this worker is there."""

    def __init__(self, channels: Sequence[Channel], every_s: float) -> None:
        self._channels = channels
        self._ends = threading.Event()
        self._every_s = every_s
        self._thread = threading.Thread(target=self._beat, name="kvstore-beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._thread.join()

    def _beat(self) -> None:
        try:
            while not self._ends.wait(self._every_s):
                for channel in self._channels:
                    channel.ask(wire.Beat())
        except KVStoreError:  # who waits for an answer of this server says so
            return
        finally:
            for channel in self._channels:
                channel.close()


class RemoteShelf:
    """Pushes to servers and pulls from them; each thread that does has connections of its own.

    Args:
        addresses: Of the servers, in the same order on all workers.
        rank: This worker's number.
        num_workers: How many there are.
        beside: The server that this worker has started, which is left last.
        lease_s: How long servers wait for a worker that is silent.

    Attributes:
        is_collective: Workers need not make the same calls.
        compression: Of what is pushed.
        updater: What the servers were told to use.
    """

    is_collective = False

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        num_workers: int,
        beside: ServerBeside | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._beside = beside
        self.rank = rank
        self.num_workers = num_workers
        self.updater: Updater | None = None
        self.compression: Compression | None = None
        self._addresses = [*addresses]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._opened: list[Channel] = []
        self._num_channels = 0
        self._parts: dict[Key, tuple[Part, ...]] = {}
        self._held: dict[Key, Held] = {}
        self._beating = Beating(self._open(), lease_s / 5)

    def init(self, values: Mapping[Key, Tensor]) -> None:
        """Worker 0 gives first values; the others wait for them.

        Raises:
            KVStoreError: a value is of another shape or type than worker 0 gave.
        """
        loads = [0] * len(self._addresses)
        for key, parts in self._parts.items():
            for part in parts:
                loads[part.place] += _numel(self._held[key], part)
        shapes = {key: tuple(value.shape) for key, value in values.items()}
        found = placed(shapes, loads, dict.fromkeys(values, not self._needs_whole()))
        self._held |= {key: Held(value.shape, value.dtype) for key, value in values.items()}
        self._parts |= {key: _sliced(self._held[key], parts) for key, parts in found.items()}
        asked: list[tuple[int, Asked]] = []
        for key, value in values.items():
            flat = value.to(CPU).contiguous()
            for part in self._parts[key]:
                piece = _part(flat, part)
                slot, shape = Slot(key, part.start), wire.shape_of(piece)
                if self.rank == 0:
                    asked.append((part.place, Asked(wire.Init(slot, shape), (piece,))))
                asked.append((part.place, Asked(wire.Know(slot, shape))))
        self._ask(asked)

    def collect(self, key: Key, values: Sequence[Tensor]) -> Tensor:
        """The sum of what this worker's devices push, in memory of its own."""
        return merged(values, CPU)

    def push(self, totals: Mapping[Key, Tensor]) -> None:
        """Send sums to the servers; over once these have taken them."""
        self._ask([one for key, total in totals.items() for one in self._pushes(key, total)])

    def read(self, key: Key, outs: Sequence[Tensor], rows: Tensor | None) -> dict[int, int]:
        """Fill `outs` with a value or some of its rows; the pushes of each worker that it holds at least."""
        parts, held = self._parts[key], self._held[key]
        if rows is None:
            asked = [(part.place, Asked(wire.Pull(Slot(key, part.start)))) for part in parts]
            answers = self._ask(asked)
            pieces = [_tensor(one) for one in answers]
            found = torch.cat(pieces) if held.shape else pieces[0]
        else:
            chosen = [(rows >= part.start) & (rows < part.stop) for part in parts]
            answers = self._ask(
                [
                    (
                        part.place,
                        Asked(
                            wire.Pull(Slot(key, part.start), int(mask.sum())),
                            (rows[mask] - part.start,),
                        ),
                    )
                    for part, mask in zip(parts, chosen, strict=True)
                ]
            )
            found = torch.empty(len(rows), *held.shape[1:], dtype=held.dtype, device=CPU)
            for mask, one in zip(chosen, answers, strict=True):
                found[mask] = _tensor(one)
        for out in outs:
            out.copy_(found.view(out.shape))
        versions = [one.answer.versions for one in answers]
        return {w: min(v.get(w, 0) for v in versions) for w in set().union(*versions)}

    def set_updater(self, updater: Updater) -> None:
        """Tell all servers.

        Raises:
            KVStoreError: it needs whole values, and some are divided; or a server does not know it.
        """
        is_divided = any(len(parts) > 1 for parts in self._parts.values())
        if not updater.by_element and is_divided:
            raise KVStoreError(
                "wanted an updater that takes parts of a value, since large values are divided among the "
                "servers, got one that needs them whole; set it before init"
            )
        self.updater = updater
        self._tell_all(_body(updater))

    def change_settings(self, updater: OptimizerUpdater) -> None:
        """Tell all servers the new settings of the optimizer that they use."""
        self.updater = updater
        self._tell_all(_body(updater))

    def optimizer_states(self) -> dict[Key, dict[str, Tensor]]:
        """What the servers' optimizers remember, put together, on the first worker; {} on others."""
        if self.rank:
            return {}
        found: dict[Slot, dict[str, Tensor]] = {}
        for one in self._tell_all(wire.States()):
            for name, tensor in load(_tensor(one).numpy().tobytes()).items():
                slot, entry = msgspec.json.decode(name, type=tuple[Slot, str])
                found.setdefault(slot, {})[entry] = tensor
        return {
            key: _whole([found.get(Slot(key, part.start), {}) for part in parts])
            for key, parts in self._parts.items()
            if any(Slot(key, part.start) in found for part in parts)
        }

    def load_optimizer_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Tell the servers to remember this; worker 0 does."""
        if self.rank:
            return
        for place in range(len(self._addresses)):
            tensors = {
                msgspec.json.encode([Slot(key, part.start), name]).decode(): _part_of_state(
                    tensor, part, self._held[key]
                )
                for key, parts in self._parts.items()
                for part in parts
                if part.place == place
                for name, tensor in states.get(key, {}).items()
            }
            packed = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
            self._ask([(place, Asked(wire.LoadStates(len(packed)), (packed,)))])

    def barrier(self) -> None:
        """Return once all workers that are there have called this."""
        self._ask([(0, Asked(wire.Barrier()))])

    def close(self) -> None:
        """Tell the servers that this worker is done."""
        self._beating.close()
        try:
            self._tell_all(wire.Leave())
        finally:
            for channel in self._opened:
                channel.close()
            self._context.term()
            if self._beside is not None:
                self._beside.close()

    def _pushes(self, key: Key, total: Tensor) -> list[tuple[int, Asked]]:
        parts = self._parts[key]
        if total.is_sparse:
            numbers, rows = total.indices()[0], total.values()
            found = []
            for part in parts:
                mask = (numbers >= part.start) & (numbers < part.stop)
                body = wire.PushRows(Slot(key, part.start), wire.shape_of(rows[mask]))
                frames = ((numbers[mask] - part.start).contiguous(), rows[mask].contiguous())
                found.append((part.place, Asked(body, frames)))
            return found
        pieces = [(part, _part(total, part)) for part in parts]
        codec = self.compression if total.is_floating_point() else None
        if codec is None:
            return [
                (
                    part.place,
                    Asked(wire.Push(Slot(key, part.start), wire.shape_of(piece)), (piece,)),
                )
                for part, piece in pieces
            ]
        params: dict[str, Any] = {"type": codec.name, **codec.options}
        return [
            (
                part.place,
                Asked(
                    wire.Push(Slot(key, part.start), wire.shape_of(piece), params),
                    (codec.encode((key, part.start), piece.reshape(-1)),),
                ),
            )
            for part, piece in pieces
        ]

    def _tell_all(self, body: wire.Body) -> list[Answered]:
        return self._ask([(place, Asked(body)) for place in range(len(self._addresses))])

    def _ask(self, asked: Sequence[tuple[int, Asked]]) -> list[Answered]:
        """All at once, to each server in order; the answers in the order of the calls."""
        channels = self._channels()
        started = [
            channel.start([one for where, one in asked if where == place])
            for place, channel in enumerate(channels)
        ]
        answers = [
            iter(channel.finish(numbers))
            for channel, numbers in zip(channels, started, strict=True)
        ]
        return [next(answers[place]) for place, _ in asked]

    def _channels(self) -> list[Channel]:
        """Of this thread, one to each server."""
        if not hasattr(self._local, "channels"):
            self._local.channels = self._open()
            with self._lock:
                self._opened += self._local.channels
        return self._local.channels

    def _open(self) -> list[Channel]:
        with self._lock:
            self._num_channels += 1
            number = self._num_channels
        return [Channel(self._context, one, self.rank, number) for one in self._addresses]

    def _needs_whole(self) -> bool:
        return self.updater is not None and not self.updater.by_element


def _body(updater: Updater) -> wire.SetOptimizer | wire.SetUpdater:
    if isinstance(updater, OptimizerUpdater):
        return wire.SetOptimizer(updater.name, updater.rescale, updater.settings)
    assert isinstance(updater, FunctionUpdater), "there are two kinds"
    return wire.SetUpdater(updater.name)


def _sliced(held: Held, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts of at most so many bytes where a key is divided; the others stay whole."""
    if len(parts) == 1:
        return tuple(parts)
    row_bytes = held.shape[1:].numel() * held.dtype.itemsize
    rows = max(1, SLICE_BYTES // max(row_bytes, 1))
    return tuple(
        Part(part.place, start, min(start + rows, part.stop))
        for part in parts
        for start in range(part.start, part.stop, rows)
    )


def _part(value: Tensor, part: Part) -> Tensor:
    return value[part.start : part.stop] if value.ndim else value


def _numel(held: Held, part: Part) -> int:
    return held.shape[1:].numel() * (part.stop - part.start)


def _tensor(one: Answered) -> Tensor:
    assert one.tensor is not None, "the answer to such a call holds one"
    return one.tensor


def _whole(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.cat([state[name] for state in states])
        if tensor.ndim and len(states) > 1
        else tensor
        for name, tensor in states[0].items()
    }


def _part_of_state(tensor: Tensor, part: Part, held: Held) -> Tensor:
    is_whole = not tensor.ndim or tensor.shape[:1] != held.shape[:1]
    return tensor.contiguous() if is_whole else tensor[part.start : part.stop].contiguous()
