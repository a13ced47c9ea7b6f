"""Arguments given by name, at their places: captured programs know them by position."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ridgeline.capture.flat_program import name_of
from ridgeline.errors import BatchError

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positional(
    fn: Callable[..., Any], inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of `fn(*inputs, **named)` by position; those left out in between are their defaults.

    Raises:
        BatchError: it takes one of them by name alone, or cannot be called so.

    Cost: 10 to 50 us.
    """
    try:
        # The `__call__` of a module takes anything.
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
        given = signature.bind(*inputs, **named).arguments
    except (TypeError, ValueError) as error:  # so of what is written in C
        raise BatchError(
            f"wanted arguments as {name_of(fn)} takes them, got {', '.join(named)} by name: {error}; name "
            "them as it does, or give all of them by position"
        ) from error
    parameters = signature.parameters.values()
    last = max(place for place, parameter in enumerate(parameters) if parameter.name in given)
    arguments: list[Any] = []
    for parameter in list(parameters)[: last + 1]:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            arguments += given.get(parameter.name, ())
        elif parameter.kind in _BY_POSITION:
            arguments.append(given.get(parameter.name, parameter.default))
        elif parameter.name in given:
            raise BatchError(
                f"wanted arguments that can be given by position, got some that {name_of(fn)} takes by name "
                f"alone ({parameter.name}); hand in a function around it that takes them by position, such "
                "as lambda x, y: model(x, y=y)"
            )
    return tuple(arguments)
