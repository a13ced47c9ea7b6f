"""What the synchronizers around a reducer leave to it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.synchronizer import UpdatesAtOnce


class AroundReducer(UpdatesAtOnce):
    """Exchanges gradients by a reducer; what else a step needs of a `Synchronizer` is for subclasses to say.

    Args:
        reducer: Averages gradients.

    Attributes:
        overhead_ns: Host time spent since `arm`, without copies and collective calls.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.overhead_ns = 0

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The present buckets, in launch order."""
        return self._reducer.buckets

    def clearing(self) -> AbstractContextManager[None]:
        """See `Reducer`."""
        return self._reducer.clearing()

    def arm(self, recorder: Recorder) -> None:
        """See `Reducer`."""
        self._recorder = recorder
        self._reducer.arm(recorder)

    def forget_order(self) -> None:
        """See `Reducer`."""
        self._reducer.forget_order()

    def order(self) -> tuple[str, ...]:
        """See `Synchronizer`."""
        return self._reducer.order()

    def take_order(self, names: Sequence[str]) -> None:
        """See `Synchronizer`."""
        self._reducer.take_order(names)

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See `Synchronizer`."""
        self._reducer.check_covers(groups)

    def state_dict(self) -> dict[str, Tensor]:
        """What the transport remembers."""
        return self._reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Have the transport remember this."""
        self._reducer.load_state_dict(state)

    def close(self) -> None:
        """Release what the reducer holds."""
        self._reducer.close()
