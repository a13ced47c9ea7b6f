"""What a program assigns, and whether that changes anything."""

import inspect
import types
from typing import Any

from torch._dynamo.variables.dicts import ConstDictVariable
from torch.nn.utils import parametrize

from ridgeline.guards.results import UNKNOWN, constant_of, value_of
from ridgeline.programs.watches.comparing import resolved


def is_computed(variable: Any, name: str) -> bool:
    """Whether code of the object's class runs where an attribute is assigned or read; a slot only keeps it.

    The compiler of torch 2.11 reads none of a setter's code, and takes what is assigned for what is there.
    """
    found = inspect.getattr_static(type(getattr(variable, "value", None)), name, None)
    methods = (types.FunctionType, staticmethod, classmethod)
    is_stored = inspect.ismemberdescriptor(found) or isinstance(found, methods)
    return not is_stored and (hasattr(type(found), "__set__") or hasattr(type(found), "__get__"))


def is_put_back(variable: Any) -> bool:
    """Whether a dictionary ends with the entries that it began with, in their order.

    `torch.func.functional_call` puts other tensors among a module's parameters while it calls that.
    """
    if not isinstance(variable, ConstDictVariable):
        return False
    items, original = variable.items, variable.original_items
    # Keys of one are wrapped, those of the other are not. What a key is may be unknown, and then equals none.
    keys, first_keys = (
        [constant_of(getattr(key, "vt", key)) for key in each] for each in (items, original)
    )
    if UNKNOWN in keys or keys != first_keys:
        return False
    pairs = zip(items.values(), original.values(), strict=True)
    return all(
        a is b
        or (a.source is not None and a.source == b.source)
        or (value_of(a) is not None and value_of(a) is value_of(b))
        for a, b in pairs
    )


def is_of_cached_weights(output: Any, variable: Any, name: str) -> bool:
    """Whether it is the cache of `torch.nn.utils.parametrize.cached()`, left new and empty by each use."""
    if not name.endswith("._cache") or variable.source is None:
        return False
    changed = resolved(output, variable.source)
    return changed is parametrize or changed is parametrize._cache  # noqa: SLF001 - nothing public gives it


def is_still(final: Any, now: Any) -> bool:
    """Whether what a program leaves is there already: names put among those of a set are, the second time."""
    is_names = type(final) is set and all(type(name) is str for name in final)
    return final is now or (is_names and type(now) is set and final == now)
