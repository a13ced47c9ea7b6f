"""Settings that a program asks torch for: each answer is a constant of the program, and is compared.

Torch's compiler compares the settings that it knows to choose operators. Code may ask for others, such as
`torch.is_autocast_cache_enabled()`, and branch on the answer.
"""

import re
from functools import partial
from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ridgeline.programs.watches.left_to_python import is_marked
from ridgeline.programs.watches.settings import Ask

_NOTED = "_ridgeline_asked"
_ASKING = re.compile(r"_{0,2}(get|is|are|has|current)_|.*_(enabled|allowed|count)$")
"""Names of functions that tell how torch is set: others may set something themselves."""
_NO_SETTING = re.compile(
    r"compiling|tracing|scripting|exporting|grad_enabled|inference_mode|available|propert"
)
"""In names of what is another while a program is read, is compared by the compiler, or stays as it is."""
_PLAIN = (str, int, type(None), torch.device, torch.dtype)
_call: Any = TorchInGraphFunctionVariable.call_function


def note_asked() -> None:
    """Have the compiler of this process note what a program asks torch for; again, too."""
    if TorchInGraphFunctionVariable.call_function is _call:  # and not patched for one reading
        TorchInGraphFunctionVariable.call_function = _answer  # type: ignore[method-assign]


def asked_of(output: Any) -> tuple[Ask, ...]:
    """Functions that ask for it again; of what the compiler makes of a program."""
    return tuple(vars(output).get(_NOTED, {}).values())


def _answer(variable: Any, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
    """In place of the method of `TorchInGraphFunctionVariable`."""
    result: VariableTracker = _call(variable, tx, args, kwargs)
    name = getattr(variable.value, "__name__", "")
    is_asking = not kwargs and _ASKING.match(name) and not _NO_SETTING.search(name)
    if is_asking and result.is_python_constant() and is_marked(tx.output.compiler_fn):
        given = [a.as_python_constant() if a.is_python_constant() else a for a in args]
        if all(isinstance(one, _PLAIN) for one in given):
            noted = vars(tx.output).setdefault(_NOTED, {})
            noted[variable.value, *given] = partial(variable.value, *given)
    return result
