"""A store that takes the place of an optimizer: values and what is remembered of them can be put back."""

from collections.abc import Mapping

from torch import Tensor

from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.state_files import States
from ridgeline.runtime.kvstore.store import KVStore
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater
from ridgeline.runtime.kvstore.values.collective import CollectiveShelf
from ridgeline.runtime.sync.buckets.coverage import check_shape


class TrainingStore(KVStore):
    """A store of several workers, with what training asks of it beside pushes and pulls."""

    def take_part(self, parameters: Mapping[str, Tensor]) -> set[Key]:
        """Fill parameters with one consistent version of a training that runs, and push from now on.

        Args:
            parameters: By key; of the same shapes as theirs.

        Returns:
            The keys to which anybody pushes.

        Raises:
            KVStoreError: they are of other shapes, or values are pushed to all the time or not equally often.

        Cost: Reads all values, those that change meanwhile again; ten seconds at most.
        """
        assert isinstance(self._shelf, RemoteShelf), "others are joined by their servers"
        # Others would wait for its pushes from `init` on, while it still reads.
        self._shelf.enters_at_init = False
        places: dict[Key, Tensor] = {
            key: parameter.detach() for key, parameter in parameters.items()
        }
        self.init([*places], [*places.values()])
        return self._shelf.take_part(places)

    def say_it_trains(self) -> None:
        """Have others join from now on, by `take_part`; worker 0 says so."""
        if isinstance(self._shelf, RemoteShelf):
            self._shelf.say_it_trains()

    def use(self, optimizer: OptimizerUpdater) -> None:
        """Have this optimizer update; one of the name that is set already brings its settings alone.

        Raises:
            KVStoreError: values are divided, and it wants them whole.
        """
        self._use(optimizer)

    def exchange(self, values: Mapping[str, Tensor]) -> None:
        """Push dense gradients; once this returns, `updated` is what came of them.

        Workers who wait for each other do it in this thread, without a copy: no other thread uses the store
        then.

        Args:
            values: By key; overwritten where servers have the values.

        Raises:
            KVStoreError, EngineError: the optimizer fails.
        """
        if isinstance(self._shelf, CollectiveShelf):
            totals: dict[Key, Tensor] = {**values}
            self._shelf.exchange(totals)
        else:
            self.pushpull([*values], [*values.values()])

    def updated(self, key: str, value: Tensor) -> Tensor:
        """The value of a key behind `exchange`, which was given `value`."""
        shelf = self._shelf
        return shelf.values[key] if isinstance(shelf, CollectiveShelf) else value

    def optimizer_states(self) -> dict[Key, dict[str, Tensor]]:
        """What is remembered of whole values, on the first worker; of a synchronous store all call it.

        Raises:
            KVStoreError: the optimizer keeps something that is no tensor.
        """
        self._settle()
        return self._shelf.optimizer_states()

    def load_states(self, states: States) -> None:
        """Have the optimizer remember this of whole values; all workers give the same."""
        self._settle()
        self._shelf.load_optimizer_states(states)

    def put_back(self, values: Mapping[str, Tensor]) -> None:
        """Continue from other values; all workers give the same.

        Raises:
            WorkloadError: one has another shape.

        Cost: A copy of each; nothing is sent.
        """
        self._settle()
        held = self._collective().values
        for key, value in values.items():
            check_shape(str(key), value, held[key])
        for key, value in values.items():
            held[key].copy_(value.detach())

    def forget(self) -> None:
        """Have the optimizer remember nothing."""
        self._settle()
        shelf = self._collective()
        assert isinstance(shelf.updater, OptimizerUpdater), "`use` was called"
        shelf.set_updater(shelf.updater.another())

    def own_states(self) -> dict[Key, dict[str, Tensor]]:
        """What is remembered of the parts that this worker updates; the tensors themselves.

        Raises:
            KVStoreError: the optimizer keeps something that is no tensor.
        """
        self._settle()
        updater = self._collective().updater
        return {} if updater is None else updater.state()

    def load_own_states(self, states: States) -> None:
        """Remember this of the parts that this worker updates."""
        self._settle()
        updater = self._collective().optimizer()
        for key, state in states.items():
            updater.load_state(key, state)

    def _collective(self) -> CollectiveShelf:
        assert isinstance(self._shelf, CollectiveShelf), "servers keep what they have"
        return self._shelf
