"""What each kind of call does to the slices of a server."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Size, Tensor

from ridgeline.errors import KVStoreError, first_line
from ridgeline.runtime.kvstore.arguments import Held
from ridgeline.runtime.kvstore.compression import KeyedCompression
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.addresses import host_identity
from ridgeline.runtime.kvstore.serving.server.slots import Slots, check_numbers
from ridgeline.runtime.kvstore.serving.wire import Shape, ValueSlot
from ridgeline.runtime.kvstore.state_files import of_keys, to_keys
from ridgeline.runtime.kvstore.updaters import FunctionUpdater, OptimizerUpdater, SetOptimizer
from ridgeline.tensors.row_sums import rows_tensor

Frames = Sequence[memoryview]


class Done(NamedTuple):
    """What is answered to a call.

    Attributes:
        tensor: Sent with the answer.
        versions: Of a value, how many pushes of each worker it holds.
        is_shared: The memory that was named is this host's.
    """

    tensor: Tensor | None = None
    versions: Mapping[int, int] = {}
    is_shared: bool = False


class Actions:
    """Does what calls ask for.

    Args:
        slots: The slices.

    Attributes:
        updates_by: How it was last set to apply sums.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.updates_by: SetOptimizer | wire.SetUpdater | None = None

    def do(self, worker: int, body: wire.Body, frames: Frames) -> Done:
        """Do what a call asks for, which need not wait.

        Raises:
            KVStoreError: what it says of slices, shapes, names or frames does not hold; nothing was done.
        """
        pushes = wire.Push | wire.PushRows
        # Counted before it is done: one that is refused is refused for good, and must not come again.
        if isinstance(body, pushes) and not self._slots.take(worker, body.slot, body.number):
            return Done()
        match body:
            case wire.Init():
                (value,) = wire.tensors_of(frames, [body.shape])
                self._slots.init(body.slot, value)
            case wire.Know():
                self._slots.check(body.slot, _held(body.shape))
                return Done(versions={worker: self._slots.num_taken(worker, body.slot)})
            case wire.Enter():
                clock = self._slots.enter(worker, body.slot, body.clock)
                return Done(versions={worker: clock})
            case wire.Push():
                self._slots.check(body.slot, _held(body.shape))
                self._slots.push(worker, body.slot, _total(body, frames))
            case wire.PushRows():
                self._push_rows(worker, body, frames)
            case wire.Pull():
                return self._pull(body, frames)
            case SetOptimizer():
                self._set_optimizer(OptimizerUpdater(body))
            case wire.SetUpdater():
                self._slots.set_updater(partial(FunctionUpdater, FunctionUpdater(body.name).name))
                self.updates_by = body
            case wire.States():
                return self._states()
            case wire.LoadStates():
                self._load_states(body, frames)
            case wire.Share():
                return Done(is_shared=body.host == host_identity())
            case _:  # what a server or shard does itself
                pass
        return Done()

    def _push_rows(self, worker: int, body: wire.PushRows, frames: Frames) -> None:
        num_rows = body.shape.sizes[0] if body.shape.sizes else 0
        numbers, rows = wire.tensors_of(frames, [Shape("int64", (num_rows,)), body.shape])
        value, _ = self._slots.pull(body.slot, None)
        self._slots.check(body.slot, Held(value.shape, rows.dtype))
        check_numbers(body.slot, numbers, Held(value.shape, value.dtype))
        # Rising, and so none twice: the tensor is made as coalesced, which nobody checks later.
        if rows.shape[1:] != value.shape[1:] or bool((numbers[1:] <= numbers[:-1]).any()):
            raise KVStoreError(
                f"wanted rows of {[*value.shape[1:]]} by rising numbers for key {body.slot.key!r}, got rows "
                f"of {[*rows.shape[1:]]}"
            )
        self._slots.push(worker, body.slot, rows_tensor(numbers, rows, value.shape))

    def _pull(self, body: wire.Pull, frames: Frames) -> Done:
        shapes = [] if body.num_rows is None else [Shape("int64", (body.num_rows,))]
        for shape in shapes:
            wire.check_shape(shape)
        rows = wire.tensors_of(frames, shapes)
        return Done(*self._slots.pull(body.slot, rows[0] if rows else None))

    def _set_optimizer(self, made: OptimizerUpdater) -> None:
        """All workers say the same: only the first, or one with other settings, changes something."""
        present, self.updates_by = self.updates_by, made.wanted
        if not isinstance(present, SetOptimizer) or present.name != made.wanted.name:
            self._slots.set_updater(made.another)
        # The same optimizer with other settings, of a scheduler say, keeps its momenta.
        elif made.wanted != present:
            self._slots.set_later_updater(made.another)
            for updater in self._slots.updaters().values():
                assert isinstance(updater, OptimizerUpdater), "they were set together"
                updater.with_settings_of(made)

    def _states(self) -> Done:
        updaters = self._slots.updaters()
        packed = save(
            of_keys({s: state for s in updaters for state in updaters[s].state().values()})
        )
        shape = Shape("uint8", (len(packed),))
        wire.check_shape(shape)
        return Done(wire.tensor_of(memoryview(bytearray(packed)), shape))

    def _load_states(self, body: wire.LoadStates, frames: Frames) -> None:
        shape = Shape("uint8", (body.num_bytes,))
        wire.check_shape(shape)
        (packed,) = wire.tensors_of(frames, [shape])
        try:
            states = to_keys(load(packed.numpy().tobytes()), ValueSlot)
        except (SafetensorError, msgspec.MsgspecError) as error:
            raise KVStoreError(f"wanted states of an optimizer, got {first_line(error)}") from error
        updaters = self._slots.updaters()
        for slot, state in states.items():
            # A file may be of more keys than this store has, or of other parts of them.
            if slot in updaters:
                updaters[slot].load_state(slot.key, state)


def _total(body: wire.Push, frames: Frames) -> Tensor:
    """What a push brings; its memory is the message's, which lives as long as the tensor."""
    if body.codec is None:
        (total,) = wire.tensors_of(frames, [body.shape])
        return total
    codec, held = KeyedCompression(body.codec), _held(body.shape)
    num_elements = held.shape.numel()
    (packed,) = wire.tensors_of(frames, [Shape("uint8", (codec.num_bytes(num_elements),))])
    return codec.decode(packed, num_elements).view(held.shape).to(held.dtype)


def _held(shape: Shape) -> Held:
    return Held(Size(shape.sizes), wire.DTYPES[shape.dtype])
