"""Server processes that a worker starts beside itself."""

import contextlib
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.addressing.addresses import LOOPBACK
from ridgeline.runtime.kvstore.serving.addressing.epochs import FoundServer
from ridgeline.runtime.kvstore.serving.server.server import LEFT

END_S = 60.0
"""How long a server may take to end once all workers have left it."""
_SHORT_S = 30.0
_MOST_SHORT = 5
"""So many servers in a row that end within that time are not started again: something ends them all."""

_log = logging.getLogger(__name__)


class ServerBeside:
    """A server in a child process, which ends once its standard input has and all workers have left.

    With snapshots one that dies is replaced by another one, which begins with what it had written down: a
    process that has imported all it needs, and waits for a word to begin.

    Args:
        num_workers: Who will call.
        staleness: See `Slots`; None for any.
        module: Imported there, to register updaters; empty for none.
        address: Where it is to listen.
        keys: Directory of the keys of those whom it lets in; empty for none.
        snapshots: A folder for those of this server.
        tell: Notified of a server that has taken the place of one that died; False: another one has before.
        idle_s: How long others may ask for nothing, once this worker has left it.

    Attributes:
        address: Where the first one is found.

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
        snapshots: Path | None = None,
        tell: Callable[[FoundServer], bool] | None = None,
        idle_s: float = math.inf,
    ) -> None:
        # A process and no fork: forked threads of torch and ZeroMQ would be in an unknown state.
        words = ["-m", "ridgeline", "kvserver", "--beside", "--workers", str(num_workers)]
        words += [] if staleness is None else ["--staleness", str(staleness)]
        words += ["--import", module] if module else []
        words += ["--listen", address]
        words += [] if idle_s == math.inf else ["--idle", str(idle_s)]
        words += ["--keys", keys] if keys else []
        words += [] if snapshots is None else ["--snapshots", str(snapshots)]
        self._words = words
        self._tell = tell
        self._lock = threading.Lock()
        self._ends = False
        self._standby: subprocess.Popen[str] | None = None
        self._process = self._started()
        _begin(self._process)
        found = self._found(self._process)
        # The line of a server that ended is empty: reading it is how that shows.
        if found is None:
            self._input.close()
            raise KVStoreError(
                f"wanted a server of a store beside this worker, got one that ended with status "
                f"{self._process.wait(END_S)}; its output is above"
            )
        self.address = found.address
        self._watch: threading.Thread | None = None
        if snapshots is not None:
            self._standby = self._started()
            self._watch = threading.Thread(target=self._restart, name="kvstore-server", daemon=True)
            self._watch.start()

    def close(self, within_s: float | None = None) -> None:
        """Let it end, and wait for that: as long as other workers use it.

        Args:
            within_s: This worker ends by an error, and others may wait for its end: it waits so long alone,
                and the server ends with it.
        """
        with self._lock:
            self._ends = True
            self._input.close()
        if self._watch is not None:
            # Joined first, since it reads what the server prints and may be about to replace it.
            self._watch.join(within_s)
        elif within_s is None:
            _ended(self._process)
        try:
            self._process.wait(END_S if within_s is None else within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        is_watched = self._watch is not None and self._watch.is_alive()
        if self._process.stdout is not None and not is_watched:  # else it is being read
            self._process.stdout.close()
        if self._standby is not None:
            _end(self._standby)

    @property
    def _input(self) -> IO[str]:
        """Of the server, which ends some time after it."""
        assert self._process.stdin is not None
        return self._process.stdin

    def _started(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for workers, who then leave it
        )

    def _found(self, process: "subprocess.Popen[str]") -> FoundServer | None:
        """Where a server says that it is; None: it ended before."""
        assert process.stdout is not None
        address, _, epoch = process.stdout.readline().strip().partition(" ")
        return FoundServer(int(epoch or 0), address) if address else None

    def _restart(self) -> None:
        """Start another server each time that one dies, until one ends by itself."""
        num_short = 0
        while True:
            begun_s = time.monotonic()
            status = _ended(self._process)
            if status == 0:
                return
            if status is None:
                _log.error("the server beside this worker did not end within %.3g s: killed", END_S)
                return
            num_short = num_short + 1 if time.monotonic() - begun_s < _SHORT_S else 0
            if num_short == _MOST_SHORT:
                _log.error(
                    "%d servers in a row died within %.3g s: none is started", num_short, _SHORT_S
                )
                return
            _log.warning(
                "the server beside this worker died (status %d): another one starts", status
            )
            with self._lock:
                self._input.close()
                if self._process.stdout is not None:
                    self._process.stdout.close()
                self._process, self._standby = self._standby or self._started(), None
                _begin(self._process)
                # `close` has closed the input of the process before: this one has to end as well.
                if self._ends:
                    self._input.close()
            found = self._found(self._process)
            # Workers follow the newest one: a second server of the same slices would split what they push.
            if found is not None and self._tell is not None and not self._tell(found):
                self._process.kill()
                return
            with self._lock:  # not before: its imports would keep the new one from beginning
                if not self._ends:
                    self._standby = self._started()


def _begin(process: "subprocess.Popen[str]") -> None:
    """Have a process serve; one that is dead is noticed by its status."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), b"\n")


def _ended(process: "subprocess.Popen[str]") -> int | None:
    """The status of a server, once it has ended; None: it had to be killed, after all workers had left it.

    Others may use it for long after its own worker has left.
    """
    assert process.stdout is not None
    # Read to the word that all have left: until then it may take as long as others train.
    for line in process.stdout:
        if line.strip() == LEFT:
            break
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process that holds nothing."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
