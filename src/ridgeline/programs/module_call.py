"""A module called with other tensors in the place of its own.

`torch.func.functional_call` puts tensors back in the wrong order where a module is held in several places
(`nn.Sequential(layer, layer)`): the user's model would keep what stood in. So each distinct module's places
are named once, and tensors that are tied between different modules are named in each of them. What the model
does not hold stands in variables, entries and elements, which hold another one for a while.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import load, put_at, store_in

Setter = Callable[[Any], None]
"""Puts an object to a place."""


def places(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by every place that they take: once for each distinct module that holds one.

    Args:
        module: The module.
        tensors: By the names of `named_parameters()` and `named_buffers()`, which name each tensor once.
    """
    own: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    stands_for = {id(own[name]): tensor for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        # By every place, also of one tensor: `named_parameters` gives tied ones once.
        for slots in (part._parameters, part._buffers):  # noqa: SLF001 - with those that are held twice
            for name, tensor in slots.items():
                if id(tensor) in stands_for:
                    found[prefix + name] = stands_for[id(tensor)]
    return found


def call_with(module: nn.Module, named: dict[str, Tensor], args: tuple[Any, ...]) -> Any:
    """The module's result with these tensors by place; what it assigns again is in `named` afterwards."""
    lists = [(vars(part), _kept_lists(part)) for part in module.modules()]
    try:
        return torch.func.functional_call(module, named, args, tie_weights=False)
    finally:
        for attributes, before in lists:
            attributes.update(before)


def _kept_lists(part: nn.Module) -> dict[str, Any]:
    """The lists that a recurrent layer makes of its weights, and makes again where these are others."""
    if not isinstance(part, nn.RNNBase):
        return {}
    return {name: vars(part)[name] for name in ("_flat_weights", "_flat_weight_refs")}


def setters_of(value: Any, reach: Reach) -> list[Setter]:
    """For each variable, entry and element that holds this very object, what puts another one there."""
    found: list[Setter] = [partial(store_in, cell) for cell in reach.cells if load(cell) is value]
    for store in reach.stores:
        if isinstance(store, set):  # in which nothing has a place
            continue
        entries = dict.items(store) if isinstance(store, dict) else enumerate(store)
        found += [partial(put_at, store, key) for key, held in entries if held is value]
    return found


@contextlib.contextmanager
def standing_in(setters: Sequence[Setter], value: Any, original: Any) -> Iterator[None]:
    """Inside, `value` stands in these places; afterwards the original does again."""
    try:
        for put in setters:
            put(value)
        yield
    finally:
        for put in setters:
            put(original)
