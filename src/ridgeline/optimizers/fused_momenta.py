"""What fused SGD takes for granted: that all parameters of a group have momenta, or none.

A parameter that was released later, or whose state was removed, has none in its first step, while
the others have. Torch's plain forms begin with its gradient; the fused one raises a TypeError (torch 2.11 to
2.13).
"""

import contextlib
from typing import Any

from torch.optim import SGD, Optimizer

_NOTHING = contextlib.nullcontext()


def unfused_where_momenta_are_missing(
    optimizer: Optimizer,
) -> contextlib.AbstractContextManager[Any]:
    """A step inside is not fused in groups of SGD in which some parameters have momenta and some none.

    Cost: About 0.3 us a parameter of a fused group with momentum. Replays do without.
    """
    if not isinstance(optimizer, SGD):
        return _NOTHING
    mixed = [group for group in optimizer.param_groups if _is_mixed(optimizer, group)]
    return _unfused(mixed) if mixed else _NOTHING


def _is_mixed(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if not group.get("fused") or not group["momentum"]:
        return False
    stepping = (p for p in group["params"] if p.grad is not None)
    has = {optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in stepping}
    return len(has) > 1


@contextlib.contextmanager
def _unfused(groups: list[dict[str, Any]]) -> Any:
    for group in groups:
        group["fused"] = False
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = True
