"""Workers train the same model: a mismatch is named at the start, not found as a hang or a wrong mean."""

import hashlib

from torch import nn

from ridgeline.errors import WorkloadError
from ridgeline.runtime.agree import gather_bytes
from ridgeline.runtime.world import World


def check_same_model(model: nn.Module, world: World) -> None:
    """Every worker must have the same parameters (names, shapes, strides, dtypes, trainability) and buffers.

    Raises:
        WorkloadError: on all workers, naming those that differ from worker 0.

    Cost: Two small all-gathers.
    """
    entries = [
        (n, tuple(p.shape), p.stride(), str(p.dtype), p.requires_grad)
        for n, p in model.named_parameters()
    ]
    entries += [(n, tuple(b.shape), (), str(b.dtype), False) for n, b in model.named_buffers()]
    digests = gather_bytes(hashlib.sha256(repr(entries).encode()).digest(), world)
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise WorkloadError(
            f"wanted the same model on all {world.size} workers, got other parameters or buffers on rank "
            f"{', '.join(others)} than on rank 0 (here {len(entries)} tensors); build the same model on "
            "every worker"
        )
