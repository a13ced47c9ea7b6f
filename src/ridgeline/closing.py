"""What holds something until it is closed, and may be used in a `with` block."""

import abc
from typing import Self


class Closing(abc.ABC):
    """A context manager whose end is its `close`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what is held. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
