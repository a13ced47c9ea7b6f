"""The arguments of an operator as JSON text, so that it can be issued again on fresh tensors.

The text is one object, `{"args": [...], "kwargs": {...}}`, with the values as the dispatcher saw
them (trailing defaults left out). Every value is one of

    {"tensor": 3}                       the tensor described by `Op.inputs[3]`
    [value, ...]                        a list or tuple (of tensors, None or numbers)
    null, true, 7, 0.5, "text"          themselves
    {"float": "inf"}                    a float that JSON cannot write: "inf", "-inf" or "nan"
    {"complex": [1.0, 0.0]}             real and imaginary part
    {"dtype": "float32"}                torch.float32
    {"device": "cpu"}                   without an index: the worker's own device
    {"memory_format": "channels_last"}  torch.channels_last
    {"layout": "strided"}               torch.strided
    {"generator": null}                 the default generator
    {"opaque": "UntypedStorage"}        what no text can say: the operator cannot be issued again

A tensor that is passed twice has one index.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import WorkloadError


def encode(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    index_of: Callable[[Tensor], int],
    *,
    where: str = "an operator",
    opaque: bool = False,
) -> str:
    """The JSON text of an operator's arguments.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        index_of: Index of a tensor in `Op.inputs`.
        where: Name of the operator, for the error.
        opaque: Write the name of the type of a value that cannot be written.

    Raises:
        WorkloadError: a value is of a type that cannot be written, and `opaque` is false.
    """

    def value(item: Any) -> Any:
        if isinstance(item, Tensor):
            return {"tensor": index_of(item)}
        if isinstance(item, (list, tuple)):
            return [value(inner) for inner in item]
        try:
            return _literal(item, where)
        except WorkloadError:
            if not opaque:
                raise
            return {"opaque": type(item).__name__}

    content = {
        "args": [value(item) for item in args],
        "kwargs": {name: value(item) for name, item in kwargs.items()},
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _literal(item: Any, where: str) -> Any:
    default_generator: dict[str, None] = {"generator": None}
    # Not `SymInt`, which no text can say: it goes on to the error.
    if item is None or isinstance(item, bool | int | str):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else {"float": str(item)}
    if isinstance(item, complex):
        return {"complex": [item.real, item.imag]}
    if isinstance(item, torch.dtype):
        return {"dtype": dtype_name(item)}
    if isinstance(item, torch.device):
        # Timings of an operator are those of any GPU of the host; an index would make keys of each worker's
        # own.
        return {"device": item.type}
    if isinstance(item, torch.memory_format):
        return {"memory_format": _bare(item)}
    if isinstance(item, torch.layout):
        return {"layout": _bare(item)}
    if isinstance(item, torch.Generator):
        return default_generator
    raise WorkloadError(
        "wanted operator arguments of tensors, numbers, text, dtypes, devices, layouts and lists "
        f"of them, got {type(item).__name__} in {where}; trace a step without this operator"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its prefix, e.g. `float32`."""
    return _bare(dtype)


def _bare(item: object) -> str:
    return str(item).removeprefix("torch.")
