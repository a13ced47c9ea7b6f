"""A run of two workers whose newest checkpoint is damaged where it holds rank 1's random state."""

from pathlib import Path

import loop_tasks
import msgspec
import torch.distributed as dist
from loop_tasks import Ask

from ridgeline.runtime.checkpoints import checkpoint
from ridgeline.workers.world import World

TENSORS = "training/model-00001-of-00001.safetensors"


def run(request: bytes) -> bytes:
    """What is told of the undisturbed run, of the resumed one, and of one without any whole checkpoint."""
    world = World.join(threads=1, device="cpu")
    root = Path(request.decode())
    ask = Ask(run_dir=str(root / "run"), epochs=2, checkpoint_every=2)
    told = [loop_tasks.run_here(msgspec.structs.replace(ask, run_dir=str(root / "whole")), world)]
    loop_tasks.run_here(msgspec.structs.replace(ask, stop_at=8), world)
    resume = msgspec.structs.replace(ask, resume=True)
    if world.rank == 0:
        _damage(root / "run" / "checkpoints" / "step-0000006")
    dist.barrier()
    told.append(loop_tasks.run_here(resume, world))
    if world.rank == 0:
        for path in (root / "run" / "checkpoints").iterdir():
            (path / "state.json").unlink()
    dist.barrier()
    told.append(loop_tasks.run_here(resume, world))
    return msgspec.json.encode(told)


def _damage(path: Path) -> None:
    """Change one bit of the random state of rank 1."""
    _, _, training, _ = checkpoint.read(path)
    state = training["random.1"].numpy().tobytes()
    file = path / TENSORS
    content = bytearray(file.read_bytes())
    content[content.index(state) + len(state) // 2] ^= 1
    file.write_bytes(content)
