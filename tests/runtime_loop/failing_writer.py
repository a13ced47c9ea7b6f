"""Runs of two workers, the first of which cannot write a checkpoint; importable in worker processes."""

from typing import Any
from unittest import mock

import loop_tasks
import msgspec
from loop_tasks import Ask

from ridgeline.runtime.checkpoints import checkpoint
from ridgeline.workers.world import World


def run(request: bytes) -> bytes:
    """What the workers tell of a run in that directory."""
    world = World.join(threads=1, device="cpu")
    ask = Ask(run_dir=request.decode(), epochs=1, checkpoint_every=2)
    with mock.patch.object(checkpoint, "write", _no_memory):
        return msgspec.json.encode(loop_tasks.run_here(ask, world))


def _no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("out of it")
