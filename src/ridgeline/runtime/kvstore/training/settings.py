"""The optimizer of a step as a store makes it again: by its name and the settings of its groups."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.updaters import SetOptimizer

_RATE = "lr"
_NOT_SET = ("params", "capturable")
"""Parameters of an optimizer's class that are no settings of a store, which captures nothing."""


def settings_of(
    optimizer: Optimizer, names: Mapping[Tensor, str], *, rescale: float, share: float
) -> SetOptimizer:
    """The settings of an optimizer as they are now.

    Args:
        optimizer: One of torch's.
        names: Keys of the parameters that are values of the store.
        rescale: What sums of gradients are multiplied by.
        share: What learning rates are multiplied by.
    """
    # What the class takes: groups hold more, such as what schedulers note.
    known = _known(type(optimizer))
    groups = [
        (_settings(group, known, share), [names[p] for p in group["params"] if p in names])
        for group in optimizer.param_groups
    ]
    common = groups[0][0]
    by_key: dict[Key, dict[str, Any]] = {
        key: own for own, keys in groups[1:] if own != common for key in keys
    }
    return SetOptimizer(type(optimizer).__name__, rescale, common, by_key)


@functools.cache
def _known(kind: type[Optimizer]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(kind).parameters if name not in _NOT_SET)


def _settings(group: Mapping[str, Any], known: Sequence[str], share: float) -> dict[str, Any]:
    found = {name: _plain(group[name]) for name in known if name in group}
    if share != 1.0 and _RATE in found:
        # In the rate and not in the sums, which adaptive optimizers divide out again.
        found[_RATE] *= share
    return found


def _plain(value: Any) -> Any:
    """A setting without tensors, which do not travel."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value
