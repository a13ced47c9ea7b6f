"""The saver: checkpoints written on the disk lane while training goes on.

What must happen at the step boundary is the staging copy; hashing, writing and renaming are done by a
task of the engine. One checkpoint is on its way at a time. A failure is kept until the run asks for
it, at its next meeting point, so that all workers stop together.
"""

import time
from pathlib import Path
from typing import Any

from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.runtime import checkpoint
from ridgeline.runtime.engine import Engine


class Saver:
    """Writes the checkpoints of one run, on rank 0.

    Args:
        directory: Where they go; made when the first is written.
        engine: Its disk lane does the writing.
        keep: Newest checkpoints to keep.

    Attributes:
        last: The newest checkpoint that is complete, or None.
        staging_s: Seconds for which training stood still for the last one.
    """

    def __init__(self, directory: Path, engine: Engine, *, keep: int) -> None:
        self._directory = directory
        self._engine = engine
        self._keep = keep
        self._written = engine.variable("checkpoint")
        self._failure: CheckpointError | None = None
        self.last = checkpoint.latest(directory)
        self.staging_s = 0.0
        checkpoint.remove_unfinished(directory)

    def save(
        self,
        position: checkpoint.Position,
        *,
        workers: int,
        model: dict[str, Tensor],
        training: dict[str, Tensor],
        state: dict[str, Any],
        begun_s: float,
    ) -> None:
        """Start writing a staged state; the tensors must not change any more.

        Args:
            position: Where the run continues.
            workers: Workers of the run.
            model: Staged tensors of the model.
            training: Staged tensors of the rest.
            state: Plain JSON values.
            begun_s: `time.perf_counter()` when staging began.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.

        Cost: Waits for the checkpoint before this one.
        """
        self.finish()

        def write() -> None:
            try:
                self.last = checkpoint.write(
                    self._directory,
                    position,
                    workers=workers,
                    model=model,
                    training=training,
                    state=state,
                )
                checkpoint.prune(self._directory, self._keep)
            except CheckpointError as error:
                self._failure = error
            except OSError as error:
                self._failure = CheckpointError(
                    f"wanted to delete checkpoints older than the newest {self._keep}, got "
                    f"{error.strerror or error} in {self._directory}; mend its permissions and go on with "
                    "--resume"
                )

        self._engine.push(write, writes=(self._written,), lane="disk", name="checkpoint")
        self.staging_s = time.perf_counter() - begun_s

    @property
    def failure(self) -> CheckpointError | None:
        """Why the last checkpoint could not be written, as far as is known; does not wait."""
        return self._failure

    def finish(self) -> None:
        """Wait until what was started is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        self._engine.wait(self._written)
        if self._failure is not None:
            raise self._failure
