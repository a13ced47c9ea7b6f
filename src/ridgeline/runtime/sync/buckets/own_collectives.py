"""Whether a model has collectives of its own, where the step's go out in another thread.

A group of gloo pairs the collectives of its workers by the order of the calls. Where a thread makes those of
the step, their order beside those of the model's backward pass (synchronised batch statistics, features
gathered for a contrastive loss) is chance, and workers wait for each other without end.
"""

from typing import Any

import torch
import torch.distributed as dist

from ridgeline.errors import WorkloadError
from ridgeline.plan import Sync


class OwnCollectives:
    """Counts the collectives of a group in the first forward pass, which the step has none in.

    Args:
        group: That in which the step exchanges gradients.
        sync: How it does.
        is_watched: Gradients go out in a thread, on the CPU; else nothing is counted.
    """

    def __init__(self, group: dist.ProcessGroup, sync: Sync, *, is_watched: bool) -> None:
        coded = "" if sync.compression == "none" else f" with compression {sync.compression!r}"
        self._words = f"sync algorithm {sync.algorithm!r}{coded}"
        # One of several backends for GPUs and CPUs.
        found: Any = group._get_backend(torch.device("cpu")) if is_watched else None  # noqa: SLF001
        self._backend = found  # the stubs lack its count
        self._before: int | None = None

    def begin(self) -> None:
        """A forward pass begins."""
        if self._backend is not None:
            self._before = self._count()

    def check(self) -> None:
        """It is over; nothing is counted from then on.

        Raises:
            WorkloadError: the model has collectives of its own.
        """
        if self._backend is None or self._before is None:
            return
        found = self._count() - self._before
        self._backend = None
        if found > 0:
            raise WorkloadError(
                f"wanted a model without collectives of its own for {self._words} on CPUs, where a thread "
                f"exchanges the gradients, got {found} in its forward pass (batch statistics or features of "
                "all workers), which would wait for each other without end; use sync=rl.Sync()"
            )

    def _count(self) -> int:
        assert self._backend is not None, "asked for before"
        # There is no public name.
        return int(self._backend._get_sequence_number_for_group())  # noqa: SLF001
