"""Keys of CURVE: they let the workers and servers of one job in, keep others out, and encrypt what is sent.

A directory holds two pairs, in the files of pyzmq: that of servers and that of workers. Each side knows the
public key of the other.
"""

import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
import zmq.auth

from ridgeline.errors import KVStoreError

VARIABLE = "RIDGELINE_KVSTORE_KEYS"
"""Names the directory where no argument does."""
SERVER, WORKER = "server", "worker"
_ADVICE = (
    "make a directory of keys with `ridgeline kvserver --new-keys DIR` and copy it to all hosts"
)


@dataclass(frozen=True)
class Keys:
    """Of one side.

    Attributes:
        directory: Where they were found.
        public: This side's own public key.
        secret: And its secret one.
        other: The public key of the other side.
    """

    directory: str
    public: bytes
    secret: bytes = field(repr=False)
    other: bytes


def make_keys(directory: Path) -> None:
    """Write new keys into a directory, which only its owner may read.

    Raises:
        KVStoreError: the directory has something in it already, or cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Never written over: servers that run go on with the old ones.
        if any(directory.iterdir()):
            raise KVStoreError(
                f"wanted a new or empty directory for keys, got {str(directory)!r} with something in it; "
                "name another, since processes with the old keys would be refused"
            )
        # Written where no other user can look, until only the owner may read the files.
        with tempfile.TemporaryDirectory(dir=directory) as private:
            for side in (SERVER, WORKER):
                for path in map(Path, zmq.auth.create_certificates(private, side)):
                    path.chmod(0o600)
                    path.rename(directory / path.name)
    except OSError as error:
        raise KVStoreError(
            f"wanted a directory for keys, got {str(directory)!r}: {error.strerror}; name one that can be "
            "written"
        ) from error


def named_directory(given: str | os.PathLike[str]) -> str:
    """The directory of an argument, or of the environment; empty where neither names one."""
    return os.fspath(given) or os.environ.get(VARIABLE, "")


def read_keys(directory: str, side: Literal["server", "worker"]) -> Keys:
    """What one side needs: its own pair, and the public key of the other.

    Raises:
        KVStoreError: a file is missing, holds no key, or others than its owner may read a secret.
    """
    if not zmq.has("curve"):
        raise KVStoreError(
            "wanted a ZeroMQ with CURVE for keys, got one without; install pyzmq's wheel"
        )
    path = Path(directory) / f"{side}.key_secret"
    public, secret = _read(path)
    known, _ = _read(Path(directory) / f"{WORKER if side == SERVER else SERVER}.key")
    if secret is None:
        raise KVStoreError(
            f"wanted a secret key in {str(path)!r}, got a public one alone; {_ADVICE}"
        )
    return Keys(directory, public, secret, known)


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        # As ssh does it: a secret that others can read is none.
        mode = stat.S_IMODE(path.stat().st_mode)
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise KVStoreError(f"wanted a key in {str(path)!r}, got {what}; {_ADVICE}") from error
    for key in (public, secret):
        if key is not None and len(key) != 40:
            raise KVStoreError(
                f"wanted keys of 40 characters in {str(path)!r}, got {len(key)}; {_ADVICE}"
            )
    if secret is not None and mode & 0o077:
        raise KVStoreError(
            f"wanted a secret that only its owner may read, got {str(path)!r} with mode {mode:o}; run "
            f"`chmod 600` on it, and make new keys if others may have read it"
        )
    return public, secret
