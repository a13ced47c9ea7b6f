"""Results that are kept by the object that they were found for, whatever it contains."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

from ridgeline.codec import Noun

P = ParamSpec("P")
R = TypeVar("R")


class _Same:
    """Equal only for the very same object."""

    __slots__ = ("value",)

    def __init__(self, value: Noun) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def kept_by_identity(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function whose results are kept; machines and workloads are told apart by identity.

    So many results are kept; each keeps the nouns that it was found for.

    Cost: a microsecond a call, whatever the nouns contain; comparing them would take far longer.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        plain: Callable[..., R] = function

        @lru_cache(maxsize)
        def found(*args: Any, **named: Any) -> R:
            return plain(*map(_value, args), **{k: _value(v) for k, v in named.items()})

        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> R:
            return found(*map(_key, args), **{k: _key(v) for k, v in named.items()})

        return call

    return decorated


def _key(value: Any) -> Any:
    return _Same(value) if isinstance(value, Noun) else value


def _value(key: Any) -> Any:
    return key.value if isinstance(key, _Same) else key
