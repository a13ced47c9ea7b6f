"""How a step is written for a child: what scripts, sessions and functions define goes by value.

Pickle writes the name of a class or a function. A child does not find the names of a notebook, of a script
that it must not run again, or of what a function has defined; cloudpickle writes those themselves. Modules
whose parameters are computed (`torch.nn.utils.parametrize`: weight or spectral normalisation) have a class
of their own each, which refuses to be written: the child makes it again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils import parametrize


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, but for such modules; `torch.save` takes this module as its `pickle_module`."""

    def reducer_override(self, obj: Any) -> Any:
        """How an object is written; NotImplemented for the usual way."""
        # `isinstance` first: the other question looks for attributes, which an object may compute.
        if not (isinstance(obj, nn.Module) and parametrize.is_parametrized(obj)):
            return super().reducer_override(obj)
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
