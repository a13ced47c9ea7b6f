"""The folder of snapshots of one training: where a killed server's values are found, and no other's.

A store that is made again with a folder continues from what is in it. A training begins with its model's
parameters or a checkpoint's, so it has a folder of its own in the one that its plan names, and removes it.
"""

import contextlib
import secrets
import shutil
from pathlib import Path

from ridgeline.workers.agree import share_bytes
from ridgeline.workers.world import World


def own_folder(parent: str, world: World) -> str:
    """A new name in a folder, the same on all workers; empty where there is to be none.

    Cost: Waits for all workers.
    """
    if not parent:
        return ""
    name = share_bytes(f"run-{secrets.token_hex(8)}".encode(), world).decode()
    return str(Path(parent) / name)


def remove_own(folder: str, rank: int) -> None:
    """Remove what the server beside a worker has written, and the folder once that of all others is gone.

    Raises:
        OSError: something cannot be removed.
    """
    for own in Path(folder).glob(f"server-{rank}-of-*"):
        shutil.rmtree(own)
    with contextlib.suppress(OSError):  # others have theirs in it, or have removed it
        Path(folder).rmdir()
