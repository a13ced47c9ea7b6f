"""Modules whose parameters are computed (`torch.nn.utils.parametrize`), written with pickle for a child.

torch gives each such module a class of its own, which pickle does not find again, and refuses to write it.
The child makes that class again: weight normalisation, spectral normalisation and the like are everyday code.
"""

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


class Pickler(pickle.Pickler):
    """Pickle's own, but for such modules; `torch.save` takes this module as its `pickle_module`."""

    def reducer_override(self, obj: Any) -> Any:
        """How an object is written; NotImplemented for the usual way."""
        # `isinstance` first: the other question looks for attributes, which an object may compute.
        if not (isinstance(obj, nn.Module) and parametrize.is_parametrized(obj)):
            return NotImplemented
        # What `_inject_new_class` made has the module's own class as its only base.
        names = tuple(obj.parametrizations)  # type: ignore[arg-type]
        # Weight normalisation hangs a local function here, for state of an older form, which is not loaded.
        state = {**vars(obj), "_load_state_dict_pre_hooks": OrderedDict()}
        return _parametrized, (type(obj).__base__, names), state


def _parametrized(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A module without its state, whose attributes of these names are computed."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)  # noqa: SLF001 - registering would compute the originals again
    for name in names:
        parametrize._inject_property(module, name)  # noqa: SLF001
    return module
