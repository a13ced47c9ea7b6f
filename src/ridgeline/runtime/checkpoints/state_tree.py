"""State dictionaries as JSON plus tensors: what checkpoints are made of.

Everything that is not a tensor becomes plain JSON, tensors become named entries of a safetensors
file. What JSON lacks is written as an object with one key that starts with `$`: `$tensor`, `$tuple`,
`$items` (a dict whose keys are not all text), `$float` (nan and infinities), `$numpy` (a number of NumPy's,
as schedules that count with it have), `$sparse` (a COO tensor by indices and values, as momenta of sparse
gradients are) and `$bytes` (a tensor of a dtype that safetensors files have no word for). Nothing is pickled,
so that loading a checkpoint executes nothing.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.reach.sparse import is_sparse, parts

_SEQUENCES: tuple[type, ...] = (list, tuple)
_MARKS = ("$tensor", "$tuple", "$items", "$float", "$numpy", "$sparse", "$bytes")
_NUMBERS = (np.bool_, np.integer, np.float64, np.float32, np.float16)
"""Of NumPy's that have an exact counterpart among Python's."""
_FILED = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
"""What torch's writer of safetensors files and its reader both know (torch 2.11 to 2.13)."""


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON form of a state; its tensors are put into `tensors` under names below `name`, as they are.

    Where two places of a state are spelled alike (`{"a.b": x, "a": {"b": y}}`), the later one's tensor gets a
    number behind its name: `a.b~2`.

    Raises:
        CheckpointError: the state holds what is neither tensor, number, text, None nor a nest of them.
    """
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        # safetensors holds dense tensors alone.
        held = [flatten(p, f"{name}.{i}", tensors) for i, p in enumerate(parts(value.detach()))]
        return {"$sparse": [*held, [*value.shape], value.is_coalesced()]}
    if isinstance(value, Tensor) and value.dtype not in _FILED and _has_bytes(value):
        held = value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$bytes": [dtype, [*value.shape], flatten(held, name, tensors)]}
    if isinstance(value, Tensor) and _has_bytes(value):
        # Files hold bytes, which lazy conjugation and negation have not changed yet.
        free = _free(name, tensors)
        tensors[free] = value.detach().resolve_conj().resolve_neg()
        return {"$tensor": free}
    if isinstance(value, _NUMBERS):  # its precision is that of what is computed with it
        return {"$numpy": [value.dtype.name, flatten(value.item(), name, tensors)]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        # A `$` of the user's own would be read back as a mark.
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if is_plain:
            return {key: flatten(item, f"{name}.{key}", tensors) for key, item in value.items()}
        items = [
            [flatten(key, name, tensors), flatten(item, f"{name}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {"$items": items}
    if isinstance(value, _SEQUENCES):
        entries = [flatten(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return {"$tuple": entries} if isinstance(value, tuple) else entries
    raise CheckpointError(
        "wanted state of dense or COO tensors, numbers, text, lists and dicts, got "
        f"{_told(value)} at {name}; let its state_dict() return plain values"
    )


def restore(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `flatten` took apart.

    Raises:
        CheckpointError: a tensor is missing or the JSON form is not one that `flatten` makes.
    """
    if isinstance(value, list):
        return [restore(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next((key for key in value if key.startswith("$")), None)
    if mark is None:
        return {key: restore(item, tensors) for key, item in value.items()}
    content = value[mark]
    if mark == "$tensor" and content in tensors:
        return tensors[content]
    if mark == "$tuple":
        return tuple(restore(item, tensors) for item in content)
    if mark == "$items":
        return {restore(key, tensors): restore(item, tensors) for key, item in content}
    if mark == "$sparse":
        indices, values, shape, is_coalesced = restore(content, tensors)
        # Checked, which torch leaves out by default: a wrong index would reach into foreign memory.
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=is_coalesced, check_invariants=True
        )
    if mark == "$bytes":
        held = restore(content[2], tensors)
        return held.view(getattr(torch, content[0])).reshape(content[1])
    if mark == "$float":
        return float(content)
    if mark == "$numpy":
        return np.dtype(content[0]).type(restore(content[1], tensors))
    raise CheckpointError(
        f"wanted one of {', '.join(_MARKS)} with its content, got {mark}: {content!r} in a checkpoint; "
        "it is damaged, resume from the one before"
    )


def like_parameters(state: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """An optimizer's state dict whose tensors have the memory format of their parameters.

    Files hold contiguous tensors; an optimizer's state follows its parameter (channels last, say). That of an
    optimizer which saves itself in a form of its own (one around another, say) stays as it is.

    Cost: Copies the tensors whose format differs.
    """
    if "state" not in state:
        return state
    formatted = {}
    for index, entries in state["state"].items():
        formatted[index] = {
            key: _in_format(value, parameters[index]) if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
    return {**state, "state": formatted}


def _free(name: str, taken: Mapping[str, Tensor]) -> str:
    """A name that no tensor has yet."""
    names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(2)))
    return next(each for each in names if each not in taken)


def _has_bytes(value: Tensor) -> bool:
    """Whether a tensor is what its bytes and its shape say: no compressed rows, no scale, no shape alone."""
    is_plain = value.layout is torch.strided and not value.is_quantized and not value.is_nested
    return is_plain and value.device.type != "meta"


def _told(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a tensor of {value.layout}, {value.dtype} on {value.device}"


def _in_format(value: Tensor, parameter: Tensor) -> Tensor:
    if is_sparse(value) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)
