"""Reading and writing the nouns: versioned JSON with provenance, written atomically.

A file is one JSON object: `kind`, `version`, `made_by`, `created`, `sha256` and `value`. Unknown fields
are errors, so a misspelt key is never ignored, and so is a value that is not what was written; a file written
or edited by hand has no `sha256`. Nothing here executes what it reads.
"""

import contextlib
import datetime
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar, Self, TypeVar

import msgspec

from ridgeline.errors import FileFormatError

VERSION = "0.1.0"


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every frozen value; two values with equal fields are equal."""


class Noun(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the values that are saved to files of their own.

    Subclasses set `kind` (a word that names the file's content) and `version` (raised whenever an
    older release could no longer read the file correctly).
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1

    def save(self, path: str | Path) -> Path:
        """Write this value to `path` as JSON, atomically, and return the path.

        Raises:
            FileFormatError: `path` is no path.
            OSError: the file cannot be written; whatever stood there before is untouched.
        """
        target = _path(path, f"{type(self).__name__}.save")
        write_atomically(target, encode(self))
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The value stored in `path`.

        Raises:
            FileFormatError: `path` is no path, or that of a device; the file is not JSON, is of another
                kind or version, or has wrong fields.
            OSError: the file cannot be read.
        """
        file = _path(path, f"{cls.__name__}.load")
        if file.is_char_device():
            raise FileFormatError(
                f"wanted a {cls.kind} file, got the device {path}, which may never end; give a file"
            )
        return decode(cls, file.read_bytes(), where=str(path))

    def diff(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """The leaves in which two values differ: JSON path to (mine, theirs); empty when equal.

        Raises:
            FileFormatError: `other` is no value of this kind.
        """
        if type(other) is not type(self):
            wanted, got = type(self).__name__, type(other).__name__
            raise FileFormatError(
                f"wanted another {wanted}, got a {got} in {wanted}.diff(); load both from {self.kind} files"
            )
        mine = dict(_leaves(msgspec.to_builtins(self)))
        theirs = dict(_leaves(msgspec.to_builtins(other)))
        paths = dict.fromkeys((*mine, *theirs))
        return {
            path: (mine.get(path), theirs.get(path))
            for path in paths
            if mine.get(path) != theirs.get(path)
        }


def _path(given: object, where: str) -> Path:
    if isinstance(given, str | Path) and str(given):
        return Path(given)
    raise FileFormatError(f"wanted a path, got {given!r} in {where}(); give the path of a file")


N = TypeVar("N", bound=Noun)


class _Envelope(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str
    version: int
    made_by: str
    created: str
    # Of the value; empty in files that were written or edited by hand.
    sha256: str = ""
    # Left as it is until kind and version are known to be those wanted.
    value: msgspec.Raw


def encode(noun: Noun) -> bytes:
    """The JSON file content of a noun, indented for people."""
    value = msgspec.json.encode(noun)
    envelope = _Envelope(
        kind=noun.kind,
        version=noun.version,
        made_by=f"ridgeline {VERSION}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        sha256=_digest(json.loads(value)),
        value=msgspec.Raw(value),
    )
    return msgspec.json.format(msgspec.json.encode(envelope), indent=1)


def decode(cls: type[N], data: bytes, *, where: str) -> N:
    """The noun in a JSON file's content; `where` names the file in errors.

    Raises:
        FileFormatError: see `Noun.load`.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.kind != cls.kind:
            raise FileFormatError(
                f"wanted a {cls.kind} file, got kind {envelope.kind!r} in {where}; "
                f"give the path of a file written as {cls.kind}"
            )
        if envelope.version != cls.version:
            raise FileFormatError(
                f"wanted {cls.kind} version {cls.version}, got version {envelope.version} in {where}, "
                f"written by {envelope.made_by}; make the file again with this release"
            )
        found = msgspec.json.decode(envelope.value, type=cls)
        # Behind the fields: what is out of its range is told by its place.
        _check_as_written(envelope, data, where)
        return found
    # ValidationError is a DecodeError; lists within lists without end are refused as a RecursionError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(
            f"wanted a {cls.kind} file, got content that does not fit in {where}: {error}; "
            "the file is damaged or was edited, make it again"
        ) from error


def _check_as_written(envelope: _Envelope, data: bytes, where: str) -> None:
    """Refuse a value that is not what was written: a digit that has changed is in its range, too.

    And a name that stands twice in an object, of which a decoder takes the last.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise msgspec.DecodeError(f"`{max(names, key=names.count)}` stands there twice")
        return found

    value = json.loads(data, object_pairs_hook=once)["value"]
    if envelope.sha256 and _digest(value) != envelope.sha256:
        raise FileFormatError(
            f"wanted the {envelope.kind} that was written, got another value than its sha256 tells in "
            f"{where}; if it was edited on purpose take the line `sha256` out, else the file is damaged: "
            "make it again"
        )


def _digest(value: Any) -> str:
    """Of a value, not of a text: white space, and how letters and numbers are written, may change."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new, never a part.

    Raises:
        OSError: see `written_atomically`.
    """
    with written_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[IO[bytes]]:
    """A file that stands at `path` once it is written whole; missing parent directories are made.

    Raises:
        OSError: no room, no permission, or a directory stands there; the old content is untouched and no
            temporary file stays.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with _named(path):
        yield from _replaced(path)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the system name the file that was wanted, not the temporary one, or none as a full disk's."""
    try:
        yield
    except OSError as error:
        at = error.filename
        if at is None or Path(os.fsdecode(at)).name.startswith(f".{path.name}."):
            error.filename = str(path)
        raise


def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """The file of `written_atomically`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory: a rename across file systems is a copy, which is not atomic. Made here and not by
    # `tempfile`, whose files are private: who may read a result is for the user's umask to say.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            # Flushed before the rename, or after a power cut the new name may stand for an empty file.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    # Also for Ctrl-C, which is no `Exception`: no temporary file may stay behind.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def cache_directory() -> Path:
    """Where what can be made again is kept: `ridgeline` below `$XDG_CACHE_HOME`, default `~/.cache`.

    Below a device, where nothing can be kept, for a user whom the system gives no home.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        above = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        above = Path(os.devnull)
    return above / "ridgeline"


def _leaves(value: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
