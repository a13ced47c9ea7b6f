"""Variables of classes that code looks up by the class, as `Settings.rate` and `type(self).rate` do.

Torch's compiler compares those that an object finds in its class. Of what a class gives itself, release 2.11
takes numbers, texts and None for constants; later ones compare them.
"""

import inspect
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from ridgeline.programs.watches.left_to_python import is_marked
from ridgeline.reach.owners import is_users_class

_getattr_in_torch: Any = UserDefinedClassVariable.var_getattr


def compare_class_variables() -> None:
    """Have the compiler of this process compare them; again, too. Other backends have what they had."""
    UserDefinedClassVariable.var_getattr = _getattr  # type: ignore[method-assign]


def _getattr(variable: Any, tx: Any, name: str) -> Any:
    """In place of the attribute of a class."""
    found = _getattr_in_torch(variable, tx, name)
    is_constant = isinstance(found, ConstantVariable) and found.source is None
    if (
        is_constant
        and variable.source is not None
        and is_marked(tx.output.compiler_fn)
        and is_users_class(variable.value)
        # What code of a metaclass gives is read with that code.
        and inspect.getattr_static(variable.value, name, found) is found.value
    ):
        held = AttrSource(variable.source, name).make_guard(GuardBuilder.CONSTANT_MATCH)
        tx.output.guards.add(held)
    return found
