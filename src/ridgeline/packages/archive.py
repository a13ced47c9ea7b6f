"""The archive that holds a saved program: an uncompressed zip, sealed by checksums, written atomically.

It stays an archive that torch itself reads (a root folder with `archive_format` and `data/aotinductor/`);
Ridgeline adds its metadata, the seal of the metadata, and the state under the same root.

The checksums guard against damage and mix-ups, never against malice: a writer of the file can
write matching checksums.
"""

import hashlib
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, BinaryIO

from ridgeline.codec import written_atomically
from ridgeline.errors import PackageError

ROOT = "package"
METADATA = "extra/ridgeline.json"
SEAL = "extra/ridgeline.sha256"
STATE = "data/ridgeline/state.safetensors"

CHUNK_BYTES = 1 << 20
LARGEST_METADATA_BYTES = 64 << 20
"""Only damage makes metadata larger: it holds a line for every tensor and every member."""

_MALFORMED = (
    zipfile.BadZipFile,
    EOFError,
    RuntimeError,  # what the zip module says of encryption and other features that no archive of ours has
    UnicodeDecodeError,
    OverflowError,
    ValueError,
    struct.error,
)


def write_archive(
    path: Path, members: Mapping[str, bytes | Path], seal: Callable[[dict[str, str]], bytes]
) -> None:
    """Write an archive so that a reader sees the old file or the new one, never a part.

    Args:
        path: The file; missing parent directories are made.
        members: Member name (below the root) to content, or to the file that holds it.
        seal: From the checksums (name to SHA-256 in hexadecimal) to the content of the metadata member.

    Raises:
        OSError: no room or no permission; the old file is untouched and no temporary file stays.
    """
    with (
        written_atomically(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        checksums = {name: _add(archive, name, content) for name, content in members.items()}
        metadata = seal(checksums)
        _add(archive, METADATA, metadata)
        _add(archive, SEAL, hashlib.sha256(metadata).hexdigest().encode())


def _add(archive: zipfile.ZipFile, name: str, content: bytes | Path) -> str:
    """Add one member and return its checksum; files are streamed, since weights may be large."""
    digest = hashlib.sha256()
    # Weights may exceed 4 GiB, and the size of a stream is not known when its header is written.
    with archive.open(f"{ROOT}/{name}", "w", force_zip64=True) as target:
        if isinstance(content, bytes):
            digest.update(content)
            target.write(content)
            return digest.hexdigest()
        with content.open("rb") as source:
            for chunk in _chunks(source):
                digest.update(chunk)
                target.write(chunk)
    return digest.hexdigest()


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


class ArchiveReader:
    """An open archive whose structure is sound; contents are vouched for by `check_members` only.

    Args:
        file: The archive, opened for reading; the caller closes it.
        where: Names the file in errors.

    Raises:
        PackageError: not a zip archive, cut short, or not one that Ridgeline wrote.
    """

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._where = where
        start = file.read(4)
        file.seek(0)
        if start != b"PK\x03\x04":
            raise PackageError(
                f"wanted a program saved by Ridgeline, got a file that is not a zip archive (it starts with "
                f"{start!r}) in {where}; give the path of a file written by save()"
            )
        try:
            self._archive = zipfile.ZipFile(file)
        except _MALFORMED as error:
            raise self._damaged("it was cut short, or its directory is broken") from error
        if f"{ROOT}/{METADATA}" not in self._archive.namelist():
            raise PackageError(
                f"wanted a program saved by Ridgeline, got a zip archive of another kind (it has no "
                f"{ROOT}/{METADATA}) in {where}; give the path of a file written by save()"
            )
        self._members = self._sound_members(file.seek(0, os.SEEK_END))

    def read(self, name: str) -> bytes:
        """The content of a small member.

        Raises:
            PackageError: it is missing or damaged.
        """
        if name not in self._members:
            raise self._damaged(f"{name} is missing")
        return b"".join(self._content(name))

    def metadata(self) -> bytes:
        """The metadata as written, after a look at its seal.

        Raises:
            PackageError: it is damaged, or was edited.
        """
        if self._members[METADATA].file_size > LARGEST_METADATA_BYTES:
            raise self._damaged(f"{METADATA} claims {self._members[METADATA].file_size} bytes")
        content = self.read(METADATA)
        # Before it is decoded: damaged metadata should not be reported as a wrong field.
        if self.read(SEAL) != hashlib.sha256(content).hexdigest().encode():
            raise self._damaged(f"{METADATA} is not what was written")
        return content

    def check_members(self, checksums: Mapping[str, str]) -> None:
        """Compare every other member with its checksum.

        Raises:
            PackageError: one is missing, extra or different; names it.

        Cost: Reads the whole file once.
        """
        names = self._members.keys() - {METADATA, SEAL}
        if missing := sorted(checksums.keys() - names):
            raise self._damaged(f"{missing[0]} is missing")
        if extra := sorted(names - checksums.keys()):
            raise self._damaged(f"{extra[0]} does not belong to it")
        for name, wanted in checksums.items():
            digest = hashlib.sha256()
            for chunk in self._content(name):
                digest.update(chunk)
            if digest.hexdigest() != wanted:
                raise self._damaged(f"{name} is not what was written")

    def _content(self, name: str) -> Iterator[bytes]:
        try:
            with self._archive.open(self._members[name]) as source:
                yield from _chunks(source)
        except _MALFORMED as error:  # the zip module compares a checksum of its own
            raise self._damaged(f"{name} is not what was written") from error

    def _sound_members(self, size_bytes: int) -> dict[str, zipfile.ZipInfo]:
        """Members by name below the root, after checks that need no content."""
        members: dict[str, zipfile.ZipInfo] = {}
        stored = 0
        for info in self._archive.infolist():
            root, _, name = info.filename.partition("/")
            if root != ROOT or "\\" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise self._damaged(f"member {info.filename!r} points outside of it")
            if name in members:
                raise self._damaged(f"{name} is in it twice")
            # Sizes first: a forged one could have gigabytes read from, or made of, a file of a few bytes.
            stored += info.compress_size
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise self._damaged(f"{name} is compressed, which no member is")
            if stored > size_bytes or not 0 <= info.header_offset < size_bytes:
                raise self._damaged(f"{name} claims bytes that are not there")
            members[name] = info
        if SEAL not in members:
            raise self._damaged(f"{SEAL} is missing")
        return members

    def _damaged(self, what: str) -> PackageError:
        return PackageError(
            f"wanted the saved program as it was written, got a damaged file: {what}, in {self._where}; "
            "nothing of it was run: copy it again, or save the program again"
        )
