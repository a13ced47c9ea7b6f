"""Connections that are let in or not: what a server and a worker make of keys, and hear of handshakes.

Who has no key, or another one, ends in the handshake of CURVE: nothing that it sends is read.
"""

import logging
import time

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.addressing.addresses import is_ipv6
from ridgeline.runtime.kvstore.serving.addressing.keys import Keys

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
TRIES = 3
"""Connections that a server may end in a row before a worker takes it for a refusal; it may have ended."""
_EVERY_S = 10.0
"""Between two lines about the same."""
_DOMAIN = "ridgeline"
_NOT_LET_IN = "a connection was refused"
_REASONS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not that of workers",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has no key or another one, or is not a worker",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ended before it had identified itself",
}

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_log = logging.getLogger(__name__)


class Refusals:
    """Says in a log what was refused: one line, and later how many there were, however many come.

    Args:
        log: Where.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told_s: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def tell(self, what: str, why: str) -> None:
        """Something was refused.

        Args:
            what: How the line begins: one of a few texts, for these are kept.
            why: How it continues.
        """
        now = time.monotonic()
        # Whoever can connect could else fill a disk with lines.
        if now - self._told_s.get(what, -_EVERY_S) < _EVERY_S:
            self._untold[what] = self._untold.get(what, 0) + 1
            return
        self._told_s[what] = now
        self._log.warning("%s: %s%s", what, why, self._others(what))

    def close(self) -> None:
        """Say how many there were that were not reported."""
        for what in [*self._untold]:
            self._log.warning("%s%s", what, self._others(what))

    def _others(self, what: str) -> str:
        untold = self._untold.pop(what, 0)
        return f" ({untold} more since the last line about this)" if untold else ""


class Door:
    """Lets workers in at a server's socket, which is not bound yet, and says whom it has not.

    Args:
        context: Of the socket.
        socket: Of the server.
        address: At which it will be bound.
        keys: Of the server; None lets everybody in.

    Attributes:
        refusals: For what else is refused.
    """

    def __init__(
        self, context: "Context", socket: "Socket", address: str, keys: Keys | None
    ) -> None:
        self.refusals = Refusals(_log)
        self._authenticator: ThreadAuthenticator | None = None
        socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
        if keys is not None:
            socket.curve_server = True
            socket.curve_secretkey = keys.secret
            socket.curve_publickey = keys.public
            # Named, so that no connection is accepted while nothing checks keys.
            socket.zap_domain = _DOMAIN.encode()
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.configure_curve_callback(_DOMAIN, _Known(keys.other))
            # A thread of its own: ZeroMQ asks it at each handshake, and waits for the answer.
            self._authenticator.start()
        self._socket = socket
        # Before the socket is bound, or the first refusals would go unseen.
        self._monitor = socket.get_monitor_socket(FAILED)

    def look(self) -> None:
        """Say whom it has not let in since; to be called often."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self.refusals.tell(_NOT_LET_IN, _REASONS[zmq.Event(event)])

    def close(self) -> None:
        """End what judges keys."""
        self.look()
        self.refusals.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()


class Entrance:
    """Has a worker's socket, which is not connected yet, let in at a server, and says so where it is not.

    Args:
        socket: Of the worker.
        address: Of the server.
        keys: Of the worker; None for a server that asks for none.

    Attributes:
        is_lost: The server has ended the connection, as far as `check` has seen; another may be there.
    """

    def __init__(self, socket: "Socket", address: str, keys: Keys | None) -> None:
        self._address = address
        self._keys = keys
        self._num_failed = 0
        self.is_lost = False
        socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
        if keys is not None:
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
            socket.curve_serverkey = keys.other
        self._socket = socket
        self._monitor = socket.get_monitor_socket(
            FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )

    def check(self) -> None:
        """See whether the server has let this worker in, as far as it has said.

        Raises:
            KVStoreError: it has not, and will not.
        """
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_failed = 0
                self.is_lost = False
            elif event == zmq.EVENT_DISCONNECTED:
                self.is_lost = True
            # ZeroMQ's only word where the server has other keys, and also where it has just ended.
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._num_failed += 1
            else:
                self._num_failed = TRIES
        if self._num_failed >= TRIES:
            raise KVStoreError(
                f"wanted to connect to the server at {self._address}, got refused: {self._reason()}; name "
                "one directory of `ridgeline kvserver --new-keys DIR` on all hosts, by keys=DIR or "
                "RIDGELINE_KVSTORE_KEYS=DIR"
            )

    def close(self) -> None:
        """Hear no more of the socket."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _reason(self) -> str:
        if self._keys is None:
            return "this worker has no keys, and the server requires them"
        return f"it does not know the keys in {self._keys.directory!r}, or has others or none"


class _Known:
    """Answers `ThreadAuthenticator` which keys are those of workers."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a key is let in."""
        return key == self._key
