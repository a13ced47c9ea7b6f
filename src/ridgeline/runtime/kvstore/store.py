"""`KVStore`: what a caller sees of a key-value store, of whatever kind.

Pushes and pulls are tasks of an engine: those of a key run in the order of the calls, those of different keys
side by side where the kind allows it, and who reads a result waits for it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ridgeline.engine import Engine, Variable
from ridgeline.errors import KVStoreError
from ridgeline.history import Outage
from ridgeline.runtime.kvstore.arguments import (
    Held,
    Key,
    check_first,
    check_fits,
    listed,
    places_for,
    rows_of,
    values_of,
)
from ridgeline.runtime.kvstore.compression import KeyedCompression
from ridgeline.runtime.kvstore.state_files import read_states, write_states
from ridgeline.runtime.kvstore.updaters import FunctionUpdater, OptimizerUpdater, SetOptimizer
from ridgeline.runtime.kvstore.values.device_order import after_present
from ridgeline.runtime.kvstore.values.reading import Reading, handed
from ridgeline.runtime.kvstore.values.shelf import Shelf, Versions

_LANE = "communication"


class KVStore:
    """Tensors by key, which workers and devices push to and pull from; see `create`.

    A key is an int or a str, all of a call alike. A call takes one key or a list of them; a value is a
    tensor or a list of tensors, one for each device, and with a list of keys a list of either. Keys are
    initialised once, which fixes shape and type.

    With several workers all make the same calls in the same order, except for pulls.

    Attributes:
        type: The kind, as it was given to `create`.
    """

    def __init__(self, kind: str, shelf: Shelf, *, threads: int) -> None:
        self.type = kind
        self._shelf = shelf
        self._engine = Engine(threads={_LANE: threads})
        self._held: dict[Key, Held] = {}
        self._variables: dict[Key, Variable] = {}
        self._versions: dict[Key, dict[int, int]] = {}
        self._is_closed = False

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._shelf.rank

    @property
    def num_workers(self) -> int:
        """How many push together; with servers, how many began the store, whatever joins or leaves later."""
        return self._shelf.num_workers

    @property
    def address(self) -> str:
        """Where another process joins, by `create("dist_async", join=...)`; empty where none can."""
        return self._shelf.address

    def present(self) -> tuple[int, ...]:
        """Ranks of the workers who are there: who began or joined, and has not left or been silent."""
        self._check_open()
        return self._shelf.present()

    @property
    def outages(self) -> tuple[Outage, ...]:
        """When this worker did not hear of a server for long, or another one took its place; in order."""
        return self._shelf.outages()

    def init(self, key: Any, value: Any) -> None:
        """Give keys their first values; with several workers, those of worker 0.

        Raises:
            KVStoreError: a key has a value, or gets one that is sparse, has no sums, or differs by worker.

        Cost: A copy of each value. With several workers waits for all of them.
        """
        given = values_of(key, value, "init")
        for one, tensors in given.items():
            if one in self._held:
                raise KVStoreError(f"wanted a new key for init, got {one!r}, which has a value")
            check_first(one, tensors[0])
        self._settle()
        self._shelf.init({one: tensors[0] for one, tensors in given.items()})
        for one, tensors in given.items():
            self._held[one] = Held(tensors[0].shape, tensors[0].dtype)
            self._variables[one] = self._engine.variable(f"key {one!r}")

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Add up what devices and workers bring, and work it into the values.

        The sum replaces the value, or an updater or optimizer takes it (`set_updater`, `set_optimizer`).
        Values are read before this returns, so that they may be overwritten. Sparse rows are COO tensors
        that are sparse in their first dimension; rows that are left out count as zero.

        Args:
            key: One or several.
            value: Of the shape and type of `init`.
            priority: Pushes and pulls with a higher one go first among those that are ready; of no effect
                with several workers, who must exchange in one order.

        Raises:
            KVStoreError: an unknown key, values of another shape or type, or a closed store.
            EngineError: raised by who reads, where other workers do not come or push something else.

        Cost: A copy or sum of this worker's values; the rest happens in a thread.
        """
        given = self._checked(key, value, "push")
        totals = {one: self._shelf.collect(one, tensors) for one, tensors in given.items()}
        for group in [totals] if self._shelf.is_collective else [{k: t} for k, t in totals.items()]:
            self._engine.push(
                after_present([*group.values()], partial(self._shelf.push, group)),
                writes=[self._variables[one] for one in group],
                lane=_LANE,
                name="push " + ", ".join(map(str, [*group][:3])),
                priority=priority,
            )

    def pull(self, key: Any, out: Any = None, priority: int = 0, *, snapshot: bool = False) -> Any:
        """The values of keys, as the pushes before this left them.

        Args:
            key: One or several.
            out: Where they go: a tensor, or one for each device; filled when this returns. None returns
                `Reading` instead, one for each key, at once.
            priority: As for `push`.
            snapshot: All values hold the same number of pushes of each worker.

        Raises:
            KVStoreError: an unknown key, or places of another shape or type.
            EngineError: a push or an update before this has failed; or there was no moment for a snapshot.

        Cost: With `out`, waits for the pushes to these keys. A snapshot reads what changes meanwhile again.
        """
        keys = listed(key, "pull")
        self._check_known(keys, "pull")
        held = {k: self._held[k] for k in keys}
        places = places_for(held) if out is None else self._checked(key, out, "pull")
        if snapshot:
            readings = self._read(places, partial(self._shelf.read_alike, places), priority)
        else:
            readings = [self._reading(k, outs, None, priority) for k, outs in places.items()]
        return handed(readings, key, out)

    def versions(self, key: Any) -> dict[int, int]:
        """How many pushes of each worker the value held that was pulled last; see `Reading.versions`."""
        first, *others = listed(key, "versions")
        self._check_known([first], "versions")
        if others:
            raise KVStoreError(f"wanted one key for versions, got {len(others)} more; ask for each")
        return dict(self._versions.get(first, {}))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull what came of it into `out`, or into the values themselves.

        Raises:
            KVStoreError, EngineError: as `push` and `pull`.
        """
        if self._shelf.is_collective:  # all keys of a call are exchanged at once
            self.push(key, value, priority)
            self.pull(key, value if out is None else out, priority)
            return
        given = self._checked(key, value, "pushpull")
        places = given if out is None else self._checked(key, out, "pushpull")
        readings = list[Reading]()
        for one, tensors in given.items():
            # The values do not change meanwhile, for this returns once all is done.
            total, outs = self._shelf.collect(one, tensors, borrows=True), places[one]
            read = partial(self._shelf.push_and_read, one, total, outs)
            readings += self._read({one: outs}, read, priority, brings=[total])
        for reading in readings:
            reading.get()

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Initialise keys, and pull what worker 0 gave.

        Raises:
            KVStoreError: as `init` and `pull`.
        """
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> Any:
        """Some rows of values, such as those of an embedding that a batch needs.

        Args:
            key: One or several.
            out: [len(row_ids), ...] for each key; None returns `Reading`, as `pull` does.
            priority: As for `push`.
            row_ids: int64, for each key; rows come in this order, as often as they are named.

        Raises:
            KVStoreError: an unknown key, no rows, or no place for them.
            EngineError: a push or an update before this has failed.
        """
        keys = listed(key, "row_sparse_pull")
        self._check_known(keys, "row_sparse_pull")
        ids = rows_of(key, row_ids, self._held)
        held = {
            k: Held(torch.Size((len(one), *self._held[k].shape[1:])), self._held[k].dtype)
            for k, one in ids.items()
        }
        places = places_for(held) if out is None else values_of(key, out, "row_sparse_pull")
        for k, outs in places.items():
            check_fits(k, outs, held[k], "row_sparse_pull")
        readings = [self._reading(k, outs, ids[k], priority) for k, outs in places.items()]
        return handed(readings, key, out)

    def set_optimizer(self, optimizer: str, *, rescale_grad: float = 1.0, **settings: Any) -> None:
        """Have an optimizer of torch take sums as gradients, from the next push on.

        With the name that is set already, settings change and momenta stay: this is how a learning rate
        follows a schedule.

        Args:
            optimizer: Name of a class in `torch.optim`, in any case: `sgd`, `adam`, `adamw`.
            rescale_grad: What sums are multiplied by, such as one over the number of workers.
            settings: Arguments of the class, such as `lr=0.1`.

        Raises:
            KVStoreError: no such optimizer, or settings that it refuses.

        Cost: Waits for what was pushed.

        Example:
            >>> import ridgeline as rl
            >>> store = rl.kvstore.create("local")
            >>> store.init("w", torch.zeros(2))
            >>> store.set_optimizer("sgd", lr=0.5)
            >>> store.push("w", torch.ones(2))
            >>> store.pull("w").get()
            tensor([-0.5000, -0.5000])
            >>> store.close()
        """
        self._use(OptimizerUpdater(SetOptimizer(optimizer, rescale_grad, settings)))

    def _use(self, made: OptimizerUpdater) -> None:
        self._settle()
        present = self._shelf.updater
        if isinstance(present, OptimizerUpdater) and present.wanted.name == made.wanted.name:
            self._shelf.change_settings(made)
        else:
            self._shelf.set_updater(made)

    def set_updater(self, updater: str) -> None:
        """Have a function work sums into values, from the next push on.

        Args:
            updater: The name that it was registered under, see `register_updater`. It is given whole values.

        Raises:
            KVStoreError: it is not registered, or values are divided and were pushed to.

        Cost: Waits for what was pushed.
        """
        made = FunctionUpdater(updater)
        self._settle()
        self._shelf.set_updater(made)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Send what is pushed in fewer bits, and what that leaves out with the next push; never in `init`.

        Args:
            compression_params: `type` (`1bit`, `2bit`, `bf16`, `int8`) and, for the first two, `threshold`.

        Raises:
            KVStoreError: an unknown type or option.

        Cost: Waits for what was pushed. Memory of a float32 copy of what is pushed.
        """
        made = KeyedCompression(compression_params)
        self._settle()
        self._shelf.compression = made

    def save_optimizer_states(self, fname: str | Path) -> None:
        """Write what the optimizer remembers; with several workers all call this, and worker 0 writes.

        Raises:
            KVStoreError: it keeps what is no tensor, or the file cannot be written.
        """
        self._settle()
        states = self._shelf.optimizer_states()
        if not self.rank:
            write_states(Path(fname), states)

    def load_optimizer_states(self, fname: str | Path) -> None:
        """Remember what a store of any number of workers saved; all workers read the file.

        Raises:
            KVStoreError: the file is missing or damaged, or no optimizer is set.
        """
        states = read_states(Path(fname))
        self._settle()
        self._shelf.load_optimizer_states(states)

    def barrier(self) -> None:
        """Return once all workers have called this and what they pushed before is done.

        Raises:
            EngineError: one of these pushes has failed.
            KVStoreError: one was taken, and the round that it was in has failed later (`staleness=0`).
        """
        self._settle()
        self._shelf.barrier()

    def close(self) -> None:
        """Finish what was pushed, and release threads and groups; further calls are refused.

        Raises:
            EngineError: a push failed and its error was not raised yet.
        """
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close; a push that was not waited for reports its failure, unless another error is on its way."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._engine.__exit__(None if error is None else type(error), error, None)
        finally:
            self._shelf.close()

    def _settle(self) -> None:
        """Wait for all that is under way."""
        self._check_open()
        self._engine.wait_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise KVStoreError("wanted an open store, got one that was closed; create another")

    def _check_known(self, keys: Sequence[Key], action: str) -> None:
        self._check_open()
        unknown = next((key for key in keys if key not in self._held), None)
        if unknown is not None:
            raise KVStoreError(
                f"wanted a key with a value for {action}, got {unknown!r}; call init first"
            )

    def _checked(self, key: Any, value: Any, action: str) -> dict[Key, list[Tensor]]:
        given = values_of(key, value, action)
        self._check_known([*given], action)
        for one, tensors in given.items():
            check_fits(one, tensors, self._held[one], action)
        return given

    def _reading(
        self, key: Key, outs: Sequence[Tensor], rows: Tensor | None, priority: int
    ) -> Reading:
        """Push a task that fills `outs`."""
        return self._read({key: outs}, partial(self._shelf.read, key, outs, rows), priority)[0]

    def _read(
        self,
        places: Mapping[Key, Sequence[Tensor]],
        read: Callable[[], Versions],
        priority: int,
        *,
        brings: Sequence[Tensor] = (),
    ) -> list[Reading]:
        """Push a task that fills places, and changes the values if it brings something."""
        name = ", ".join(map(str, [*places][:3]))
        done, found = self._engine.variable(f"pulled {name}"), dict[int, int]()
        variables = [self._variables[key] for key in places]
        outs = [out for some in places.values() for out in some]
        self._engine.push(
            after_present([*brings, *outs], lambda: found.update(read())),
            reads=() if brings else variables,
            writes=(*variables, done) if brings else (done,),
            lane=_LANE,
            name=f"{'pushpull' if brings else 'pull'} {name}",
            priority=priority,
        )
        self._versions |= dict.fromkeys(places, found)
        wait = partial(self._engine.wait, done)
        return [Reading(wait, some[0], found) for some in places.values()]
