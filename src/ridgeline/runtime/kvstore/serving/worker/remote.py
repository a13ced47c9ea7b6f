"""The values of servers, as a worker sees them: kind `dist_async`."""

import sys
import time
from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from ridgeline.errors import KVStoreError, unanswered
from ridgeline.history import Outage
from ridgeline.runtime.kvstore.arguments import Held, Key
from ridgeline.runtime.kvstore.serving import slices, wire
from ridgeline.runtime.kvstore.serving.addressing.epochs import Notice
from ridgeline.runtime.kvstore.serving.addressing.keys import Keys
from ridgeline.runtime.kvstore.serving.joining.beside import END_S, ServerBeside
from ridgeline.runtime.kvstore.serving.joining.members import Members
from ridgeline.runtime.kvstore.serving.server.server import LEASE_S
from ridgeline.runtime.kvstore.serving.server.shard import FIRST
from ridgeline.runtime.kvstore.serving.slices import Answered, Asked
from ridgeline.runtime.kvstore.serving.wire import ValueSlot
from ridgeline.runtime.kvstore.serving.worker.channel import PARKED_S
from ridgeline.runtime.kvstore.serving.worker.connections import Connections
from ridgeline.runtime.kvstore.state_files import of_keys, to_keys
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, Updater
from ridgeline.runtime.kvstore.values.merging import merged
from ridgeline.runtime.kvstore.values.placement import (
    ValuePart,
    loads_of,
    part_of,
    placed,
    state_of_part,
    whole_state,
)
from ridgeline.runtime.kvstore.values.shelf import Shelf, Versions
from ridgeline.workers import leaving

CPU = torch.device("cpu")
ALIKE_S = 10.0
"""How long a moment is looked for at which values hold the same pushes."""
GIVEN_UP_S = 2.0
"""How long others may use the server beside a worker that has waited for them in vain."""


class RemoteShelf(Shelf):
    """Pushes to servers and pulls from them.

    Args:
        addresses: Of the servers, in the same order on all workers.
        rank: This worker's number.
        num_workers: How many there are.
        beside: The server that this worker has started, which is left last.
        lease_s: How long servers wait for a worker that is silent.
        keys: Of workers; None for servers that ask for none.
        notice: Reports servers that take the place of these; None where none does.
        members: Who takes part; None where none can join.
        parked_s: How long a call may wait for other workers, or for a server.

    Attributes:
        enters_at_init: One who comes later pushes to keys from their `init` on, else from `take_part` on.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        num_workers: int,
        beside: ServerBeside | None = None,
        lease_s: float = LEASE_S,
        keys: Keys | None = None,
        notice: Notice | None = None,
        members: Members | None = None,
        parked_s: float = PARKED_S,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.address = "" if members is None else members.address
        self.enters_at_init = True
        self._members = members
        self.num_workers = num_workers
        self._beside = beside
        self._parts: dict[Key, tuple[ValuePart, ...]] = {}
        self._held: dict[Key, Held] = {}
        self._parked_s = parked_s
        self._servers = Connections(addresses, rank, lease_s / 5, keys, notice, parked_s)

    def join(self) -> None:
        """Have the servers count this worker, which comes later than others."""
        told = self._servers.tell_all(wire.Join())
        self._servers.peers[0].barriers = told[0].answer.versions[self.rank]

    def present(self) -> tuple[int, ...]:
        """The workers whom the first server counts."""
        (told,) = self._servers.ask([Asked(wire.Beat())])
        return tuple(sorted(told.answer.versions))

    def init(self, values: Mapping[Key, Tensor]) -> None:
        """Worker 0 gives first values; the others wait for them, or find those that are there by now.

        Raises:
            KVStoreError: a value is of another shape or type than worker 0 gave, or too large to be sent.
        """
        self._place(values)
        try:
            inits, knows = self._first_calls(values)
            self._servers.ask(inits)  # one that is refused would be waited for
            self._servers.ask(knows)
            if self._is_later:
                if self.enters_at_init:
                    self._enter([*values])
            elif self._members is not None and self.rank == FIRST:
                self._members.tell(
                    {k: self._held[k] for k in values}, {k: self._parts[k] for k in values}
                )
        except KVStoreError:
            for key in values:  # what comes next is placed as on workers that never asked for these
                del self._held[key], self._parts[key]
            raise

    def collect(self, key: Key, values: Sequence[Tensor], *, borrows: bool = False) -> Tensor:
        """The sum of what this worker's devices push."""
        return merged(values, CPU, borrows=borrows)

    def push(self, totals: Mapping[Key, Tensor]) -> None:
        """Send sums to the servers; over once these have taken them."""
        self._servers.ask(
            [call for key, total in totals.items() for call in self._pushes(key, total)]
        )

    def read(self, key: Key, outs: Sequence[Tensor], rows: Tensor | None) -> Versions:
        """Fill `outs` with a value or some of its rows; what all parts of it hold."""
        parts = self._parts[key]
        if rows is None:
            return _held_by_all(self._servers.ask(slices.pulls(key, outs, parts)))
        return _held_by_all(self._servers.ask(slices.pulls_of_rows(key, outs, rows, parts)))

    def read_alike(self, places: Mapping[Key, Sequence[Tensor]]) -> Versions:
        """Fill places with values that all hold the same pushes.

        Parts that hold others than most of them are read again, until none does.

        Raises:
            KVStoreError: there was no such moment for some time.
        """
        calls = [
            c for key, outs in places.items() for c in slices.pulls(key, outs, self._parts[key])
        ]
        seen = [one.answer.versions for one in self._servers.ask(calls)]
        begun_s = time.monotonic()
        while True:
            newest = {w: max(one.get(w, 0) for one in seen) for one in seen for w in one}
            # Only those are read again: all of them would never meet a moment while others push.
            behind = [number for number, one in enumerate(seen) if dict(one) != newest]
            if not behind:
                return newest
            if time.monotonic() - begun_s > ALIKE_S:
                raise KVStoreError(
                    f"wanted a moment at which keys {[*places][:8]} hold the same pushes of each worker, got "
                    f"none for {ALIKE_S:.0f} s; push all of them equally often, or pull behind a barrier"
                )
            again = self._servers.ask([calls[number] for number in behind])
            for number, one in zip(behind, again, strict=True):
                seen[number] = one.answer.versions

    def take_part(self, places: Mapping[Key, Tensor]) -> set[Key]:
        """Fill places with one consistent version of keys, and push to these from now on.

        Where rounds are worked in together, that is the version behind the last one that goes without this
        worker, for whose pushes all wait then. Else it is taken first, so that none waits for a worker that
        still reads.

        Returns:
            The keys to which anybody has pushed; the others are as they were at first.

        Raises:
            KVStoreError: there was no moment at which all that are pushed to held the same pushes.
        """
        # Keys that nobody pushes to would keep the others from ever holding alike.
        first = {key: self.read(key, [place], None) for key, place in places.items()}
        pushed = {key: [places[key]] for key, versions in first.items() if versions}
        bound = None if self._members is None else self._members.record.staleness
        if bound == 0:
            self._enter([*places], is_common=True)
            self.read_alike(pushed)
            return {*pushed}
        held = self.read_alike(pushed)
        self._enter([*places])
        if bound is not None and pushed:
            # Any key says how far all are: the smallest costs least to read.
            least = min(pushed, key=lambda key: places[key].numel())
            now = self.read(least, [torch.empty_like(places[least])], None)
            if max(count - held.get(worker, 0) for worker, count in now.items()) > bound:
                self.read_alike(pushed)  # they continued meanwhile, by more than they may be ahead
        return {*pushed}

    def say_it_trains(self) -> None:
        """Have others join from now on who train by the same plan; worker 0 says so."""
        if self._members is not None and self.rank == FIRST:
            self._members.say_it_trains()

    def push_and_read(self, key: Key, total: Tensor, outs: Sequence[Tensor]) -> Versions:
        """Both, part by part, so that values come back while sums are still sent."""
        if self._servers.keeps:
            total = total.clone()  # it may be in `outs`, and be sent again after these are filled
        there = self._pushes(key, total)
        back = slices.pulls(key, outs, self._parts[key])
        pairs = [call for pair in zip(there, back, strict=True) for call in pair]
        # Of the pulls alone: answers to pushes hold no value.
        return _held_by_all(self._servers.ask(pairs)[1::2])

    def set_updater(self, updater: Updater) -> None:
        """Notify all servers.

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
        self._servers.tell_all(_body(updater))

    def change_settings(self, updater: OptimizerUpdater) -> None:
        """Send all servers the new settings of the optimizer that they use."""
        self.updater = updater
        self._servers.tell_all(_body(updater))

    def optimizer_states(self) -> dict[Key, dict[str, Tensor]]:
        """What the servers' optimizers remember, put together, on the first worker; {} on others."""
        if self.rank:
            return {}
        found: dict[ValueSlot, dict[str, Tensor]] = {}
        for one in self._servers.tell_all(wire.States()):
            assert one.tensor is not None, "the answer to such a call holds one"
            found |= to_keys(load(one.tensor.numpy().tobytes()), ValueSlot)
        return {
            key: whole_state([found.get(ValueSlot(key, part.start), {}) for part in parts])
            for key, parts in self._parts.items()
            if any(ValueSlot(key, part.start) in found for part in parts)
        }

    def load_optimizer_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Have the servers remember this; worker 0 does."""
        if self.rank:
            return
        for place in range(self._servers.num_servers):
            there = {
                ValueSlot(key, part.start): {
                    name: state_of_part(tensor, part, self._held[key].shape)
                    for name, tensor in states.get(key, {}).items()
                }
                for key, parts in self._parts.items()
                for part in parts
                if part.place == place
            }
            packed = torch.frombuffer(bytearray(save(of_keys(there))), dtype=torch.uint8)
            self._servers.ask([Asked(wire.LoadStates(len(packed)), (packed,), place=place)])

    def barrier(self) -> None:
        """Return once all workers that are there have called this.

        Raises:
            KVStoreError: a round has failed to which this worker has pushed.
        """
        self._servers.ask([Asked(wire.Barrier())])
        if self._members is None or self._members.record.staleness != 0:
            return
        # The first server tells of its own slices: of those elsewhere each is asked for.
        asked: list[Asked] = []
        for key, parts in self._parts.items():
            whole = torch.empty(self._held[key].shape, dtype=self._held[key].dtype, device="meta")
            for part in parts:
                if part.place:
                    body = wire.Know(
                        ValueSlot(key, part.start), wire.shape_of(part_of(whole, part))
                    )
                    asked.append(Asked(body, place=part.place))
        self._servers.ask(asked)

    def outages(self) -> tuple[Outage, ...]:
        """When servers were not heard of by this worker, or others took their place; in order."""
        return self._servers.outages()

    def close(self) -> None:
        """Leave the servers, and end the one that this worker has started once all have left it."""
        try:
            self._servers.close()
        finally:
            if self._beside is not None:
                error = sys.exc_info()[1] or getattr(sys, "last_value", None)
                most_s = min(END_S, self._parked_s)
                # Who was waited for in vain would be waited for as long again, before the error is seen.
                within_s = min(GIVEN_UP_S, most_s) if unanswered(error) else most_s
                self._beside.close(within_s if leaving.is_failure(error) else None)

    def _first_calls(self, values: Mapping[Key, Tensor]) -> tuple[list[Asked], list[Asked]]:
        """Those that give first values, on worker 0, and those that wait for them."""
        inits: list[Asked] = []
        knows: list[Asked] = []
        for key, value in values.items():
            wire.check_key(key)
            wire.check_type(key, value.dtype)
            flat = value.to(CPU).contiguous()
            for part in self._parts[key]:
                piece = part_of(flat, part)
                slot, shape = ValueSlot(key, part.start), wire.shape_of(piece)
                wire.check_shape(shape)
                if self.rank == FIRST:
                    inits.append(Asked(wire.Init(slot, shape), (piece,), place=part.place))
                knows.append(Asked(wire.Know(slot, shape), place=part.place))
        return inits, knows

    @property
    def _is_later(self) -> bool:
        return self._members is not None and self._members.is_later

    def _enter(self, keys: Sequence[Key], *, is_common: bool = False) -> None:
        """Be as far with keys as the slowest of those who push to them; of rounds, alike if `is_common`."""
        slots = [
            (part.place, ValueSlot(key, part.start)) for key in keys for part in self._parts[key]
        ]
        told = self._servers.ask([Asked(wire.Enter(slot), place=place) for place, slot in slots])
        if self._members is None or self._members.record.staleness != 0:
            return
        # Rounds of all parts of a key wait for this worker now; it begins with one that none has done.
        clocks = dict.fromkeys(keys, 0)
        for (_, slot), one in zip(slots, told, strict=True):
            clocks[slot.key] = max(clocks[slot.key], one.answer.versions[self.rank])
        if is_common:
            clocks = dict.fromkeys(keys, max(clocks.values()))
        enters = [(place, wire.Enter(slot, clocks[slot.key])) for place, slot in slots]
        self._servers.ask([Asked(body, place=place) for place, body in enters])

    def _pushes(self, key: Key, total: Tensor) -> list[Asked]:
        return slices.pushes(key, total, self._parts[key], self.compression)

    def _place(self, values: Mapping[Key, Tensor]) -> None:
        """Decide which servers hold what of new keys, the same on all workers, or find what was decided."""
        held = {key: Held(value.shape, value.dtype) for key, value in values.items()}
        if self._members is not None and self._is_later:
            self._parts |= self._members.parts_of(held, lambda: FIRST in self.present())
            self._held |= held
            return
        self._held |= held
        shapes = {key: one.shape for key, one in self._held.items()}
        loads = loads_of(self._parts, shapes, self._servers.num_servers)
        divides = self.updater is None or self.updater.by_element
        found = placed({key: shapes[key] for key in held}, loads, divides=divides)
        for key, one in held.items():
            self._parts[key] = slices.sliced(one, found[key], divides=divides)


def _held_by_all(answered: Sequence[Answered]) -> Versions:
    """How many pushes of each worker all parts of a value hold."""
    seen = [one.answer.versions for one in answered]
    return {w: min(one.get(w, 0) for one in seen) for w in seen[0]} if seen else {}


def _body(updater: Updater) -> wire.Body:
    if isinstance(updater, OptimizerUpdater):
        return updater.wanted
    return wire.SetUpdater(updater.name)
