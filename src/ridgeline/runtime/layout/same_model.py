"""Workers train the same model: a mismatch is named at the start, not found as a hang or a wrong mean."""

import hashlib

from torch import nn

from ridgeline.errors import WorkloadError
from ridgeline.optimizer_forms import sparse_modules
from ridgeline.runtime.layout.ownership import replicated_axes
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World


def check_same_model(model: nn.Module, world: World) -> None:
    """Every worker must have the same parameters (names, shapes, strides, dtypes, trainability) and buffers.

    And the same layers with sparse gradients, which are exchanged in another way.

    Those along an axis on which the model is replicated are compared; see `layout.ownership`.

    Raises:
        WorkloadError: on all workers, naming those that differ from the first one.

    Cost: Two small all-gathers.
    """
    by_rows = {f"{name}.weight".lstrip(".") for name in sparse_modules(model)}
    entries: list[tuple[object, ...]] = [
        (n, tuple(p.shape), p.stride(), str(p.dtype), p.requires_grad, n in by_rows)
        for n, p in model.named_parameters()
    ]
    entries += [(n, tuple(b.shape), (), str(b.dtype), False) for n, b in model.named_buffers()]
    digest = hashlib.sha256(repr(entries).encode()).digest()
    for axis in replicated_axes(world):
        ranks = world.ranks(axis)
        digests = gather_bytes(digest, world, axis)
        others = [r for r, other in zip(ranks, digests, strict=True) if other != digests[0]]
        if others:
            raise WorkloadError(
                f"wanted the same model on all {len(ranks)} workers, got other parameters or buffers on rank "
                f"{', '.join(map(str, others))} than on rank {ranks[0]} (here {len(entries)} tensors); build "
                "the same model on every worker"
            )
