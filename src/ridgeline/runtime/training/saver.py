"""The saver: checkpoints written on the disk lane while training goes on.

What must happen at the step boundary is the staging copy, and before it the gathering of what other workers
hold: no collective is started from another thread. Writing, hashing and renaming are done by a task of the
engine. One checkpoint is on its way at a time. A failure is kept until the run asks for it, at its next
meeting point, so that all workers stop together.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from ridgeline.engine import Engine
from ridgeline.errors import CheckpointError
from ridgeline.runtime.checkpoints import checkpoint, checkpoint_directory
from ridgeline.runtime.checkpoints.staging import Staging

MODEL = "model."
"""Head of the names of the model's tensors, among those of all."""


class Saver:
    """Writes the checkpoints of one run, on rank 0.

    Args:
        directory: Where they go; made when the first is written.
        engine: Its disk lane does the writing.
        staging: Where the state is copied to; closed by whoever made it, behind the engine.
        keep: Newest checkpoints to keep.

    Attributes:
        last: The newest checkpoint that this run wrote or goes on from, or None.
        failure: Why the last checkpoint could not be written, as far as is known, or None.
    """

    def __init__(self, directory: Path, engine: Engine, staging: Staging, *, keep: int) -> None:
        self._directory = directory
        self._engine = engine
        self._staging = staging
        self._keep = keep
        self._written = engine.variable("checkpoint")
        self.failure: CheckpointError | None = None
        self._skipped: set[Path] = set()
        self.last: Path | None = None

    def take_up(self, path: Path, skipped: Collection[Path]) -> None:
        """Continue from a checkpoint, and start deleting what killed runs left.

        Args:
            path: Whole.
            skipped: Newer ones, which are not; they are replaced or deleted when the run gets there.
        """
        self.last, self._skipped = path, set(skipped)
        self._start(lambda: self._tidy(path), "tidy")

    def save(
        self,
        position: checkpoint.Position,
        *,
        workers: int,
        tensors: dict[str, Tensor],
        gathered: dict[str, Tensor],
        state: dict[str, Any],
    ) -> None:
        """Copy the state and start writing it; after this the run may change it.

        Args:
            position: Where the run continues.
            workers: Workers of the run.
            tensors: The state as it is, by name; names of the model's begin with `MODEL`.
            gathered: More of it, on the CPU already, for this checkpoint alone.
            state: Plain JSON values.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.

        Cost: Waits for the checkpoint before this one, then for the device; see `Staging`.
        """
        # One at a time: the staging memory of the checkpoint before is still being written from.
        self.finish()
        staged = self._staging.copies(tensors) | gathered
        model = {n.removeprefix(MODEL): t for n, t in staged.items() if n.startswith(MODEL)}
        training = {n: t for n, t in staged.items() if not n.startswith(MODEL)}

        def write() -> None:
            path = checkpoint.write(
                self._directory,
                position,
                workers=workers,
                model=model,
                training=training,
                state=state,
            )
            self.last = path
            # Its step is written anew, so that it counts among the whole ones again.
            self._skipped.discard(path)
            # Only behind the new checkpoint: until then older ones are all that there is.
            self._tidy(path)

        self._start(write, "checkpoint")

    def finish(self) -> None:
        """Wait until what was started is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        self._engine.wait(self._written)
        if self.failure is not None:
            raise self.failure

    def _start(self, work: Callable[[], None], name: str) -> None:
        """Run a task on the disk lane; its error is kept until the run asks."""

        def attempt() -> None:
            try:
                work()
            except CheckpointError as error:
                self.failure = error
            except Exception as error:  # noqa: BLE001 - raised by all workers, once they ask
                self.failure = CheckpointError(
                    f"wanted to write a checkpoint into {self._directory}, got {type(error).__name__}: "
                    f"{error}; the previous checkpoint is untouched: fix it and continue with --resume"
                )
                self.failure.__cause__ = error

        self._engine.push(attempt, writes=(self._written,), lane="disk", name=name)

    def _tidy(self, newest: Path) -> None:
        try:
            checkpoint_directory.tidy(
                self._directory, newest=newest, keep=self._keep, skipped=self._skipped
            )
        except OSError as error:
            raise CheckpointError(
                f"wanted to delete checkpoints older than the newest {self._keep} and what killed runs left, "
                f"got {error.strerror or error} in {self._directory}; fix its permissions and continue with "
                "--resume"
            ) from error
