"""Whether many objects are what they were, asked by one compiled function: it runs before every step."""

from collections.abc import Callable, Sequence
from typing import Any

_GONE = (LookupError, AttributeError, TypeError, ValueError)
"""What looking raises where something is there no longer, or a container has another length."""


class Sameness:
    """Identities of objects as they are now, put together as source text.

    Objects are compared with `is` alone, so that an equal one in their place counts as another: the
    caller then has to look closer. What is compared is kept, so that none gives its place to another.
    """

    def __init__(self) -> None:
        self._scope: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._lines: list[str] = []
        self._empty: list[dict[Any, Any] | Sequence[Any]] = []

    def attribute(self, owner: Any, name: str) -> None:
        """An attribute of an object."""
        value = getattr(owner, name)
        self._require(f"{self._name(owner)}.{name} is {self._name(value)}")

    def result(self, function: Callable[..., Any], *arguments: bool) -> None:
        """What a function gives for constants."""
        call = f"{self._name(function)}({', '.join(map(repr, arguments))})"
        self._require(f"{call} is {self._name(function(*arguments))}")

    def entry(self, store: dict[Any, Any], key: str) -> None:
        """What a dictionary holds under a key, or that it holds nothing there."""
        if key in store:
            self._require(f"{self._name(store)}[{key!r}] is {self._name(store[key])}")
        else:
            self._require(f"{key!r} not in {self._name(store)}")

    def entries(self, store: dict[Any, Any] | Sequence[Any]) -> None:
        """All that a dictionary or a list holds, in order."""
        values = [*dict.values(store)] if isinstance(store, dict) else [*store]
        if not values:
            self._empty.append(store)
            return
        found = [f"a{place}" for place in range(len(values))]
        # Those of `dict` itself, of which a class of a dictionary that tells of looks does not hear.
        name = self._name(store)
        held = f"dict.values({name})" if isinstance(store, dict) else name
        # Unpacking checks the length as well: another one raises, and counts as gone.
        self._lines.append(f"{', '.join(found)}, = {held}")
        pairs = zip(found, map(self._name, values), strict=True)
        self._require(" and ".join(f"{name} is {value}" for name, value in pairs))

    def compiled(self) -> Callable[[], bool]:
        """A function that says whether all is the same now.

        Cost: When called 0.02 us an object, 0.03 us an attribute, and 0.05 us a container that holds any.
        """
        empty: list[str] = []
        if self._empty:
            self._scope["EMPTY"] = tuple(self._empty)
            empty = ["if any(EMPTY): return False"]
        lines = "".join(f"        {line}\n" for line in (*empty, *self._lines, "return True"))
        scope: dict[str, Any] = {**self._scope, "GONE": _GONE}
        source = f"def is_same():\n    try:\n{lines}    except GONE:\n        return False\n"
        exec(compile(source, "<sameness>", "exec"), scope)
        is_same: Callable[[], bool] = scope["is_same"]
        return is_same

    def _require(self, term: str) -> None:
        self._lines.append(f"if not ({term}): return False")

    def _name(self, value: Any) -> str:
        if value is None or value is True or value is False:
            return repr(value)
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"c{len(self._names)}"
            self._scope[name] = value
        return name
