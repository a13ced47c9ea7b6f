"""Which checkpoint a run resumes from: the newest intact one, and why newer ones were skipped."""

import os
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import CheckpointError
from ridgeline.runtime.checkpoints import checkpoint, checkpoint_directory
from ridgeline.runtime.checkpoints.checkpoint import Position


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest intact checkpoint.

    Attributes:
        path: Where it is.
        position: Where the run continues.
        skipped: What is wrong with each newer one, newest first.
    """

    path: Path
    position: Position
    skipped: dict[Path, str]

    @property
    def lines(self) -> list[str]:
        """Lines for the user: every skipped checkpoint with its reason, and the one that is used."""
        told = [f"skipped {path}: {reason}" for path, reason in self.skipped.items()]
        return [*told, f"going on from {self.path}"]


def find(directory: Path) -> Found | None:
    """The newest intact checkpoint of a run; None if none was ever completed.

    Raises:
        CheckpointError: there are checkpoints, but none is whole; says what is wrong with each. Or what
            stands in the directory's place is none.

    Cost: Reads every file of the newest checkpoint, and of older ones as far as newer ones are damaged.
    """
    if os.path.lexists(directory) and not directory.is_dir():
        # A disk that is not mounted, say: the run would begin anew, though it has checkpoints there.
        what = f"a link to {directory.readlink()}" if directory.is_symlink() else "a file"
        raise CheckpointError(
            f"wanted a directory of checkpoints to continue from, got {what} in {directory}, which is none; "
            "mount or restore what it leads to, or remove it to begin anew"
        )
    skipped: dict[Path, str] = {}
    # Those without a manifest as well: one that is passed over is told of, with the reason.
    for path in reversed(checkpoint_directory.named(directory)):
        try:
            position = checkpoint.inspect(path).position
        except checkpoint.DamageError as error:
            skipped[path] = str(error)
        else:
            return Found(path=path, position=position, skipped=skipped)
    if not skipped:
        return None
    told = "; ".join(f"{path.name}: {reason}" for path, reason in skipped.items())
    raise CheckpointError(
        f"wanted a whole checkpoint to continue from, got {len(skipped)} damaged in {directory}: {told}; "
        "restore the files of one, or start again in another run directory"
    )
