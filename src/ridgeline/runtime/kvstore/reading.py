"""What a pull without a place for its result returns."""

from collections.abc import Callable

from torch import Tensor


class Reading:
    """A value that may still be on its way; reading it waits.

    Args:
        wait: Returns once `tensor` is filled, or raises what kept it from being.
        tensor: Where it is going to be.
    """

    def __init__(self, wait: Callable[[], None], tensor: Tensor) -> None:
        self._wait: Callable[[], None] | None = wait
        self._tensor = tensor

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
