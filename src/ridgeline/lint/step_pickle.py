"""How a step is written for a child: what scripts, sessions and functions define goes by value.

Pickle writes the name of a class or a function. A child does not find the names of a notebook, of a script
that it must not run again, or of what a function has defined; cloudpickle writes those themselves. Their
globals become those of a module of the same name there, in which torch's compiler looks them up.

Modules whose parameters are computed (`torch.nn.utils.parametrize`: weight or spectral normalisation) have a
class of their own each, which refuses to be written: the child makes it again.
"""

import importlib
import sys
from collections import OrderedDict
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils import parametrize


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, but for such modules; `torch.save` takes this module as its `pickle_module`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._globals: dict[int, _Globals] = {}

    def reducer_override(self, obj: Any) -> Any:
        """How an object is written; NotImplemented for the usual way."""
        if isinstance(obj, FunctionType):
            reduced = super().reducer_override(obj)
            return reduced if reduced is NotImplemented else self._in_a_module(reduced)
        # `isinstance` first: the other question looks for attributes, which an object may compute.
        if not (isinstance(obj, nn.Module) and parametrize.is_parametrized(obj)):
            return super().reducer_override(obj)
        # What `_inject_new_class` made has the module's own class as its only base.
        names = tuple(obj.parametrizations)  # type: ignore[arg-type]
        # Weight normalisation hangs a local function here, for state of an older form, which is not loaded.
        state = {**vars(obj), "_load_state_dict_pre_hooks": OrderedDict()}
        return _parametrized, (type(obj).__base__, names), state

    def _in_a_module(self, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """A function by value, which cloudpickle makes of its code and of a dictionary for its globals."""
        make, (code, names, *rest), *others = reduced
        # One for all functions of a module, as cloudpickle has one dictionary for them.
        held = self._globals.setdefault(id(names), _Globals(names))
        return make, (code, held, *rest), *others


class _Globals:
    """The dictionary of a module, written as the names that say which module that is."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return _globals_of_module, (self._names,)


_MADE: dict[str, ModuleType] = {}
"""Modules of this process that hold what another one had defined."""


def _globals_of_module(names: dict[str, Any]) -> dict[str, Any]:
    """The dictionary of the module of that name: one that can be imported, or one that is made for it."""
    name = names.get("__name__", "__main__")
    try:
        if name == "__main__":  # here that is another program
            raise ImportError(name)
        module = importlib.import_module(name)
    except ImportError:
        module = sys.modules[name] = _MADE.setdefault(name, ModuleType(name))
    for key, value in names.items():
        module.__dict__.setdefault(key, value)
    return module.__dict__


def _parametrized(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A module without its state, whose attributes of these names are computed."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)  # noqa: SLF001 - registering would compute the originals again
    for name in names:
        parametrize._inject_property(module, name)  # noqa: SLF001
    return module
