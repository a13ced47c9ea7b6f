"""The optimizer's state where each worker has that of its part: cut to parts, and made whole again.

What is remembered of each element (a momentum, say) has the shape of the parameter, or of the part. What else
there is (a count of steps) is common to all elements, and so to all workers that hold some of them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import WorkloadError
from ridgeline.optimizers.groups import state_methods
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.sharded.shards import ParameterShard, is_shard
from ridgeline.workers.agree import gather_bytes, gather_tensor
from ridgeline.workers.world import World

COMMON = ("step", "eta", "mu", "mu_product")
"""What torch's optimizers remember of all elements of a parameter together.

Source: torch/optim, releases 2.11 to 2.13.
"""


class _Told(msgspec.Struct):
    """What a worker remembers of its part of one parameter.

    Attributes:
        kinds: Key to dtype (as torch prints it, without the prefix) of what it remembers of each element.
        common: Key to dtype and value of what is common to all; the dtype is empty for what is no tensor.
    """

    kinds: dict[str, str] = {}
    common: dict[str, tuple[str, bool | int | float | None]] = {}


def cut_state(optimizer: Optimizer, shards: Mapping[nn.Parameter, ParameterShard]) -> None:
    """Put the state of parts in the place of that of whole parameters, where there is any.

    Args:
        optimizer: Its state is changed.
        shards: What this worker holds of each parameter.

    Cost: A look at each parameter; a copy of what is cut.
    """
    state = optimizer.state
    for parameter, own in shards.items():
        if parameter not in state:
            continue
        # Popped, so that the whole of a parameter is given back before that of the next is cut.
        whole = state.pop(parameter)
        if own.part is not None:
            state[own.part] = {
                key: own.of(_as(value, parameter)).clone() if _is_by_element(key, value) else value
                for key, value in whole.items()
            }


def _is_by_element(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in COMMON


def _as(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A tensor laid out in memory as the parameter."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def has_shards(optimizer: Optimizer) -> bool:
    """Whether an optimizer remembers something of a part, asked unheard; see `watched_state`."""
    return any(map(is_shard, state_methods(optimizer).keys(optimizer.state)))


def refuse_shards(optimizer: Optimizer) -> None:
    """Refuse to take the state of one worker's parts for the whole.

    Raises:
        WorkloadError: the optimizer has some.
    """
    if has_shards(optimizer):
        raise WorkloadError(
            f"wanted the whole state of {type(optimizer).__name__}, got that of this worker's part of the "
            "parameters; call step.optimizer_state() on all workers before the step is closed: the first one "
            "gets all of it, for load_state_dict"
        )


def whole_state(
    optimizer: Optimizer,
    shards: Mapping[nn.Parameter, ParameterShard],
    buckets: Sequence[Bucket],
    world: World,
) -> dict[str, Any]:
    """The optimizer's `state_dict()` with the state of all workers' parts; see `ShardedUpdate`.

    Args:
        optimizer: Of this worker.
        shards: What this worker holds of each parameter; nothing before the first step.
        buckets: Of the parameters.
        world: This worker's place.
    """
    before = optimizer.state
    if not shards:
        return optimizer.state_dict()
    # Of frozen parameters, and of all where it was loaded since the last step, it is whole on every worker.
    found = {key: dict(value) for key, value in dict.items(before) if not is_shard(key)}
    everyone = _exchanged([_told(one, before) for one in shards.values()], world)
    for parameter, told in zip(shards, everyone, strict=True):
        for key, (kind, value) in told.common.items():
            tensor = _scalar(value, kind) if kind else value
            found.setdefault(parameter, {})[key] = tensor
    kinds = dict(zip(shards, (told.kinds for told in everyone), strict=True))
    for bucket in buckets:
        for key, kind in dict.fromkeys(i for p in bucket.parameters for i in kinds[p].items()):
            flat = _gathered(bucket, key, kind, shards, before, world)
            for position, parameter in enumerate(bucket.parameters):
                if flat is not None and kinds[parameter].get(key) == kind:
                    value = bucket.place(position, flat).clone().cpu()
                    found.setdefault(parameter, {})[key] = value
    whole: defaultdict[Tensor, Any] = defaultdict(dict)
    whole.update(found if world.rank == 0 else {})
    # In its place for as long: `state_dict` takes no other state, and its hook refuses that of parts.
    optimizer.state = whole
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = before


def _scalar(value: Any, kind: str) -> Tensor:
    return torch.tensor(value, dtype=getattr(torch, kind), device="cpu")


def _told(own: ParameterShard, state: Mapping[Any, Mapping[str, Any]]) -> _Told:
    mine: Mapping[str, Any] = {} if own.part is None else state.get(own.part, {})
    told = _Told({}, {})
    for key, value in mine.items():
        kind = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""
        if _is_by_element(key, value):
            told.kinds[key] = kind
        else:
            told.common[key] = (kind, value.item() if isinstance(value, Tensor) else value)
    return told


def _exchanged(mine: list[_Told], world: World) -> list[_Told]:
    """What all workers together remember of each parameter."""
    everyone = [
        msgspec.json.decode(data, type=list[_Told])
        for data in gather_bytes(msgspec.json.encode(mine), world)
    ]
    return [
        _Told(
            {key: kind for told in tolds for key, kind in told.kinds.items()},
            {key: value for told in tolds for key, value in told.common.items()},
        )
        for tolds in zip(*everyone, strict=True)
    ]


def _gathered(
    bucket: Bucket,
    key: str,
    kind: str,
    shards: Mapping[nn.Parameter, ParameterShard],
    state: Mapping[Any, Mapping[str, Any]],
    world: World,
) -> Tensor | None:
    """One kind of state of a bucket's parameters, laid out like its payload; None but on the first worker."""
    dtype = getattr(torch, kind)
    share = bucket.payload.numel() // world.axis_size("data")
    carrier = torch.zeros(share, dtype=dtype, device=bucket.payload.device)
    first = bucket.payload.storage_offset() + world.axis_rank("data") * share
    for parameter in bucket.parameters:
        own = shards[parameter]
        value = None if own.part is None else state.get(own.part, {}).get(key)
        # Else zeros travel, since all come to the gathering: this worker has no part, or no state of it.
        if value is not None and value.dtype == dtype:
            begin = bucket.views[own.position].storage_offset() + own.begin - first
            carrier[begin : begin + value.numel()].copy_(value)
    whole = gather_tensor(carrier, key, world, "data")
    return None if whole is None else whole.view(-1)
