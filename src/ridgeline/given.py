"""What callers give, held to the annotations of a function or a frozen value before it is used.

Type checkers hold programs to annotations. Notebooks and scripts that none has read learn here what a name
wants, and not from an attribute that something else lacks, deep inside or after minutes of measuring.
"""

import functools
import inspect
import math
import numbers
import operator
import re
import reprlib
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import msgspec

from ridgeline.codec import Noun, Value
from ridgeline.errors import RidgelineError

P = ParamSpec("P")
R = TypeVar("R")
Whole = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    None: "None",
}
_TEXTS = (str, bytes, bytearray)
_BOUNDS = (("ge", ">=", operator.ge), ("gt", ">", operator.gt), ("lt", "<", operator.lt))
"""Of `msgspec.Meta`: its names, how they are written, and what they ask."""


def checked(
    error: type[RidgelineError], but: Collection[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: arguments of another type than annotated, and NaN as a number, raise this error.

    Numbers of NumPy's become Python's where a number is wanted. Annotations in quotes, of classes that the
    module does not import, are not looked at; nor is what an iterator gives.

    Args:
        error: What to raise.
        but: Arguments that the function looks at itself, since it can say more about them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.items()
        said = ((name, given.annotation) for name, given in parameters)
        hints = {name: Any if hint is inspect.Parameter.empty else hint for name, hint in said}
        where = f"ridgeline.{function.__qualname__.removesuffix('.__init__')}"

        def taken(name: str, value: Any) -> Any:
            hint = hints.get(name, Any)
            value = _as_python(value, hint)
            if name not in but and not _fits(value, hint):
                raise error(
                    f"wanted {name} {_phrase(hint)}, got {_told(value)} in {where}(); "
                    f"{_advice(value, hint, where)}"
                )
            return value

        @functools.wraps(function)
        def held(*args: P.args, **kwargs: P.kwargs) -> R:
            # What is missing, or one too many, is for Python to say.
            known = [taken(name, value) for name, value in zip(hints, args, strict=False)]
            named = {name: taken(name, value) for name, value in kwargs.items()}
            return cast("Callable[..., R]", function)(*known, *args[len(known) :], **named)

        return held

    return decorate


def check_fields(value: Value, error: type[RidgelineError], where: str, prefix: str = "") -> None:
    """Raise this error for a field of another type, or out of the range, that its annotation says.

    Decoders check files; a value that is made in Python is held to no annotation.

    Args:
        value: Its own fields are checked, not those of values in them.
        error: What to raise.
        where: What the fields belong to, such as `the plan`.
        prefix: What stands before the names of fields, such as `sync.`.
    """
    kind = type(value)
    for field, hint in _fields(kind).items():
        mine = getattr(value, field)
        if isinstance(mine, numbers.Number) and type(mine) not in _WORDS:
            mine = _as_python(mine, hint)
            msgspec.structs.force_setattr(value, field, mine)
        if _is_known(kind, field, mine) if type(mine) in _WORDS else _fits(mine, hint):
            continue
        wanted, advice = _phrase(hint), "correct it"
        if get_origin(hint) is Literal:
            advice = "choose one of those"
        elif get_origin(hint) is Annotated and _fits(mine, get_args(hint)[0]):
            wanted, advice = _bounds(hint).strip(), "raise it"
        raise error(f"wanted {prefix}{field} {wanted}, got {_told(mine)} in {where}; {advice}")


@functools.cache
def _fields(kind: type[Value]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


@functools.lru_cache(1024, typed=True)
def _is_known(kind: type[Value], field: str, value: object) -> bool:
    """Whether a number or text fits a field; remembered, since a search makes plans by the hundred."""
    return _fits(value, _fields(kind)[field])


def _as_python(value: Any, hint: Any) -> Any:
    """A number of NumPy's as Python's, where the annotation wants a number."""
    if type(value) in _WORDS or not isinstance(value, numbers.Real):
        return value
    kinds = {part for one in (hint, *get_args(hint)) for part in (one, *get_args(one))}
    if isinstance(value, numbers.Integral):
        return int(value) if kinds & {int, float} else value
    return float(value) if float in kinds else value


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of the type of an annotation; unknown forms of annotations take anything."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, inner[0]) and all(_is_within(value, meta) for meta in inner[1:])
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in inner)
    if origin is Literal:
        # By type first: a comparison of a tensor is no answer.
        return any(type(value) is type(word) and value == word for word in inner)
    if hint in (int, float):
        # A bool passes every comparison with numbers, and NaN none.
        kinds = int if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and not _is_nan(value)
    if hint is None or hint is Any:
        return value is None or hint is Any
    kind = origin or hint
    if kind is Callable:
        return callable(value)
    if not isinstance(kind, type) or (getattr(kind, "_is_protocol", False) and not origin):
        return True
    if kind is tuple and inner[1:] == (...,):
        kind, inner = Sequence, inner[:1]
    return _is_one(value, kind) and _holds(value, inner)


def _is_one(value: object, kind: type) -> bool:
    # Each letter of a text is a text: `allow="bf16"` is no collection of names.
    is_text = (
        issubclass(kind, Iterable) and isinstance(value, _TEXTS) and not issubclass(kind, _TEXTS)
    )
    return isinstance(value, kind) and not is_text


def _holds(value: object, inner: tuple[Any, ...]) -> bool:
    """Whether all that a collection holds is of the types in brackets."""
    if isinstance(value, Mapping) and len(inner) == 2:
        return all(_fits(key, inner[0]) and _fits(held, inner[1]) for key, held in value.items())
    if isinstance(value, Collection) and len(inner) == 1:
        return all(_fits(held, inner[0]) for held in value)
    return True


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_within(value: Any, meta: object) -> bool:
    limits = [(test, getattr(meta, name, None)) for name, _, test in _BOUNDS]
    return all(limit is None or test(value, limit) for test, limit in limits)


def _bounds(hint: Any) -> str:
    """The range that an annotation allows, such as ` >= 1`."""
    limits = [
        (sign, getattr(meta, name, None))
        for meta in get_args(hint)[1:]
        for name, sign, _ in _BOUNDS
    ]
    return " and".join(f" {sign} {limit}" for sign, limit in limits if limit is not None)


def _phrase(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"to be one of {', '.join(map(repr, get_args(hint)))}"
    return f"as {_named(hint)}"


def _named(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{_named(inner[0])}{_bounds(hint)}"
    if origin in (Union, types.UnionType):
        return " or ".join(_named(None if part is types.NoneType else part) for part in inner)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is Callable or hint is Callable:
        return "a function"
    return re.sub(r"[\w.]+\.(?=\w)", "", inspect.formatannotation(hint))


def _told(value: object) -> str:
    """A value in a message: as written where that is short, else what it is."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (int, float, Path, *_TEXTS, list, tuple, dict)):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"


def _advice(value: object, hint: Any, where: str) -> str:
    """What to give instead: a file is read by the noun that it holds."""
    nouns = [
        part
        for part in (hint, *get_args(hint))
        if isinstance(part, type) and issubclass(part, Noun)
    ]
    if nouns and isinstance(value, str | Path):
        return f"for a file give rl.{nouns[0].__name__}.load(path)"
    return f"help({where}) says what each argument is"
