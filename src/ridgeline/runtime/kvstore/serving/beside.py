"""Server processes that a worker starts beside itself."""

import subprocess
import sys

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.addresses import LOOPBACK

END_S = 60.0
"""How long a server may take to end once all workers have left it."""


class ServerBeside:
    """A server in a child process, which ends once its standard input has and all workers have left.

    Args:
        num_workers: Who will call.
        staleness: See `Slots`; None for any.
        module: Imported there, to register updaters; empty for none.
        address: Where it is to listen.
        keys: Directory of the keys of those whom it lets in; empty for none.

    Attributes:
        address: Where it is found.

    Raises:
        KVStoreError: it did not start; its standard error has gone to that of this process.
    """

    def __init__(
        self,
        num_workers: int,
        staleness: int | None,
        module: str,
        address: str = LOOPBACK,
        keys: str = "",
    ) -> None:
        words = ["-m", "ridgeline", "kvserver", "--beside", "--workers", str(num_workers)]
        words += [] if staleness is None else ["--staleness", str(staleness)]
        words += ["--import", module] if module else []
        words += ["--listen", address]
        words += ["--keys", keys] if keys else []
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for workers, who then leave it
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            self.close()
            raise KVStoreError(
                f"wanted a server of a store beside this worker, got one that ended with status "
                f"{self._process.returncode}; what it said stands above"
            )

    def close(self) -> None:
        """Let it end, and wait for that."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
