"""The most elements of a deque (`collections.deque(maxlen=10)`), which drops others: a window over steps.

Torch's compiler (2.11 to 2.13) reads a deque that it finds as one without a limit, so that what a program
appends is there beside what should have been dropped.
"""

import collections
from typing import Any

from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import DequeVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import compare_by_name, value_of

_wrap_in_torch: Any = VariableBuilder.wrap_listlike


def keep_limits_of_deques() -> None:
    """Have the compiler of this process read deques with their limits; again, too."""
    VariableBuilder.wrap_listlike = _wrap  # type: ignore[method-assign]


def require_limit(builder: Any, guard: Guard) -> None:
    """A `Guard` on the most elements of a deque, where another one may take its place."""
    value = value_of(builder, guard)
    if isinstance(value, collections.deque):
        compare_by_name(builder, guard.name, lambda now: now.maxlen, "the limit of ")


def _wrap(builder: Any, value: Any) -> Any:
    """In place of the method of `VariableBuilder`."""
    result = _wrap_in_torch(builder, value)
    if isinstance(result, DequeVariable) and isinstance(value, collections.deque):
        result.maxlen = ConstantVariable.create(value.maxlen)
    return result
