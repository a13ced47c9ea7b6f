"""What a pull without a place for its result returns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


class Reading:
    """A value that may still be on its way; reading it waits.

    Args:
        wait: Returns once `tensor` is filled, or raises what kept it from being.
        tensor: Where it is going to be.
        versions: What it is going to hold; filled with it.
    """

    def __init__(
        self, wait: Callable[[], None], tensor: Tensor, versions: Mapping[int, int]
    ) -> None:
        self._wait: Callable[[], None] | None = wait
        self._tensor = tensor
        self._versions = versions

    def get(self) -> Tensor:
        """The value; the same tensor each time, which is the caller's own.

        Raises:
            EngineError: a push, update or pull that it follows has failed.

        Cost: Waits for what was pushed to the key before.
        """
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._tensor

    @property
    def versions(self) -> dict[int, int]:
        """How many pushes of each worker the value holds, by rank: of `dist_async`, else empty.

        Of a value that is divided among servers, what all of its parts hold.

        Raises:
            EngineError: as `get`.

        Cost: As `get`.
        """
        self.get()
        return dict(self._versions)


def handed(readings: Sequence[Reading], key: Any, out: Any) -> Any:
    """What a call returns that reads: one for each key, or the one; None where `out` is filled."""
    if out is None:
        return readings[0] if isinstance(key, int | str) else readings
    for reading in readings:
        reading.get()
    return None
