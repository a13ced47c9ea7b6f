"""Context variables (`contextvars`) and those of the environment as they are, to be put back."""

import contextvars
import os
from collections.abc import Container, Iterator
from typing import Any

_MISSING = object()


class ContextVariables:
    """The values that this thread's context has at present.

    Args:
        reached: Numbers (`id`) of the variables that count: torch keeps settings in others.
    """

    def __init__(self, reached: Container[int]) -> None:
        self._reached = reached
        self._before = contextvars.copy_context()

    def changes(self) -> Iterator[tuple[contextvars.ContextVar[Any], Any, Any]]:
        """The variables that hold another object now, with both; one that was not set had its default.

        A variable that was not set and has no default is left out: nothing can take its value away again.
        """
        for variable, now in contextvars.copy_context().items():
            before = self._before.get(variable, _MISSING)
            # First what decides most: torch has a thousand, and `id` is an audited event (`side_effects`).
            if before is now or id(variable) not in self._reached:
                continue
            if before is _MISSING:
                before = _default(variable)
            if before is not _MISSING and before is not now:
                yield variable, before, now

    def restore(self) -> None:
        """Put them back."""
        for variable, before, _ in [*self.changes()]:
            variable.set(before)


class Environment:
    """The variables of the environment at present, where code that can be reached names it.

    Args:
        reached: Numbers (`id`) of what can be reached.
    """

    def __init__(self, reached: Container[int]) -> None:
        self._before = dict(os.environ) if id(os.environ) in reached else None

    def changes(self) -> Iterator[tuple[str, str | None, str | None]]:
        """The names of those that are others now, with both texts; None where there is no such variable."""
        if self._before is not None:
            for name in sorted(self._before.keys() | os.environ.keys()):
                before, now = self._before.get(name), os.environ.get(name)
                if before != now:
                    yield name, before, now

    def restore(self) -> None:
        """Put them back."""
        for name, before, _ in [*self.changes()]:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _default(variable: contextvars.ContextVar[Any]) -> Any:
    try:
        return contextvars.Context().run(variable.get)
    except LookupError:
        return _MISSING
