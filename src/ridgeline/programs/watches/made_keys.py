"""Keys that a program makes and looks up in a dictionary: a tuple with a module in it, a weak reference.

The compiler compares a key that is a constant, or that it found somewhere. For others it guards nothing
(torch 2.11 to 2.13), so that an entry which is new, gone or elsewhere would not be seen, as in a
`WeakKeyDictionary`.
"""

from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable

_contains: Any = ConstDictVariable.__contains__


def compare_made_keys() -> None:
    """Have the compiler of this process compare all keys where a program looks for one that it makes."""
    # By `__contains__`, which is asked before each look-up; what has a guard gets no second one.
    ConstDictVariable.__contains__ = _is_in  # type: ignore[method-assign]


def _is_in(variable: Any, key: VariableTracker) -> bool:
    """In place of the method of `ConstDictVariable`."""
    is_made = key.source is None and not key.is_python_constant()
    if is_made and variable.source is not None:
        effects = InstructionTranslator.current_tx().output.side_effects
        if not effects.is_modified(variable):  # which was compared when the program changed it
            variable.install_dict_keys_match_guard()
    return bool(_contains(variable, key))
