"""Objects in C that code calls: getters of Python's `operator`, and context variables.

Torch's compiler (2.11 to 2.13) reads `operator.itemgetter("x")(batch)`, and no getter that was made before,
which a name holds. Nor does it read what a `contextvars.ContextVar` gives.
"""

import contextlib
import contextvars
import functools
import operator
from typing import Any

from torch._dynamo.polyfills import operator as polyfills
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import compare, value_of
from ridgeline.programs.watches.left_to_python import is_marked, is_plain_value

_FUNCTIONS: dict[type, Any] = {
    getattr(operator, name): getattr(polyfills, name).__torch_dynamo_polyfill__
    for name in ("itemgetter", "attrgetter", "methodcaller")
}
"""What the compiler reads in their place: each makes a function of the same parts."""
_call_in_torch: Any = UserDefinedObjectVariable.call_function
_method_in_torch: Any = UserDefinedObjectVariable.call_method


def read_getters() -> None:
    """Have the compiler of this process read them; again, too. Programs of other backends are as before."""
    UserDefinedObjectVariable.call_function = _call  # type: ignore[method-assign]
    UserDefinedObjectVariable.call_method = _call_method  # type: ignore[method-assign]


def _call(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """In place of the call of an object."""
    value, source = variable.value, variable.source
    make = _FUNCTIONS.get(type(value))
    if make is not None and source is not None and is_marked(tx.output.compiler_fn):
        parts, named = _parts_of(value)
        if all(map(_is_plain, (*parts, *named.values()))):
            tx.output.guards.add(Guard(source, _require_parts))
            getter = VariableTracker.build(tx, make(*parts, **named))
            return getter.call_function(tx, args, kwargs)
    return _call_in_torch(variable, tx, args, kwargs)


def _parts_of(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a getter was made of."""
    make, args = value.__reduce__()
    if isinstance(make, functools.partial):
        return (*make.args, *args), make.keywords
    return args, {}


def _is_plain(part: Any) -> bool:
    ends = (part.start, part.stop, part.step) if isinstance(part, slice) else part
    return is_plain_value(ends)


def _require_parts(builder: Any, guard: Guard) -> None:
    """A `Guard` on what a getter gets."""
    value, manager = value_of(builder, guard), builder.get_guard_manager(guard)
    # As text, in which True is not 1.
    compare(manager, _text_of, value, f"what {guard.name} gets")


def _text_of(value: Any) -> str:
    return repr((type(value), _parts_of(value) if type(value) in _FUNCTIONS else None))


def _call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """In place of the methods of objects."""
    asked, source = variable.value, variable.source
    is_variable = type(asked) is contextvars.ContextVar and name == "get" and source is not None
    if is_variable and not kwargs and is_marked(tx.output.compiler_fn):
        now = missing = object()
        with contextlib.suppress(LookupError):
            now = asked.get(missing) if args else asked.get()
        if now is not missing:
            held = CallFunctionNoArgsSource(AttrSource(source, "get"))
            return VariableTracker.build(tx, now, held)
    return _method_in_torch(variable, tx, name, args, kwargs)
