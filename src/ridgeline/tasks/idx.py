"""Reader of IDX files, the format of MNIST and Fashion-MNIST, plain or compressed with gzip.

An IDX file is a big-endian header (magic number, then one 32-bit size per dimension) and the values,
here unsigned bytes. Everything is checked before a tensor is returned, because a damaged file found
in the middle of a run costs the run.

Source: the format description at the end of LeCun, Cortes and Burges, The MNIST Database.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from torch import Tensor

from ridgeline.errors import DataError

NUM_CLASSES = 10
"""Labels are 0 to 9 in every data set that is published under these file names."""

IMAGES_MAGIC = 0x00000803
LABELS_MAGIC = 0x00000801
_CHUNK_BYTES = 1 << 20
_FETCH_AGAIN = "the file is damaged or cut short, fetch it again"

Split = Literal["train", "t10k"]


def read_split(directory: Path, split: Split) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, H, W] and labels int64 [N] of one split.

    Args:
        directory: Holds `SPLIT-images-idx3-ubyte` and `SPLIT-labels-idx1-ubyte`, each plain or with
            `.gz`; where both stand, the plain file is read.
        split: `train`, or `t10k` for the test images.

    Raises:
        DataError: The directory or a file is missing, unreadable or damaged, the images and labels
            differ in number, or a label is not a digit.
    """
    if not directory.is_dir():
        raise DataError(
            f"wanted a directory with IDX files, got no directory at {directory}; give the one that "
            "holds train-images-idx3-ubyte[.gz] and its three companions"
        )
    images_path = _find(directory, f"{split}-images-idx3-ubyte")
    labels_path = _find(directory, f"{split}-labels-idx1-ubyte")
    images = _read(images_path, magic=IMAGES_MAGIC)
    labels = _read(labels_path, magic=LABELS_MAGIC)
    if len(images) != len(labels):
        raise DataError(
            f"wanted one label per image, got {len(images)} images in {images_path} and "
            f"{len(labels)} labels in {labels_path}; put files of one data set there"
        )
    outside = (labels >= NUM_CLASSES).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise DataError(
            f"wanted labels 0 to {NUM_CLASSES - 1}, got label {int(labels[first])} at index {first} "
            f"in {labels_path}; the built-in tasks know {NUM_CLASSES} classes: write a task file for "
            "more, or fetch the file again if it is damaged"
        )
    return images, labels.to(torch.int64)


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"wanted {name} or {name}.gz, got neither in {directory}; put the four IDX files of one data "
        "set there"
    )


def _read(path: Path, *, magic: int) -> Tensor:
    """The values of one file as a uint8 tensor of the shape in its header."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            shape = _read_shape(file, path, magic=magic)
            return _read_values(file, path, shape=shape)
    # A damaged gzip stream shows as any of the first three, depending on where the damage is.
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"wanted a gzip file, got a stream that does not decompress ({error}) in {path}; "
            f"{_FETCH_AGAIN}"
        ) from error
    except OSError as error:
        raise DataError(
            f"wanted a readable file, got {error.strerror or error} for {path}; check its permissions "
            "and its disk"
        ) from error


def _read_shape(file: BinaryIO | gzip.GzipFile, path: Path, *, magic: int) -> tuple[int, ...]:
    num_dims = magic & 0xFF
    header_bytes = 4 + 4 * num_dims
    header = file.read(header_bytes)
    # The magic number comes first: a file of another kind may well be shorter than the header.
    if len(header) >= 4 and (got := struct.unpack(">I", header[:4])[0]) != magic:
        raise DataError(
            f"wanted magic number {magic:#010x} (unsigned bytes, {num_dims} dimensions), got "
            f"{got:#010x} in {path}; this is another kind of file, check its name"
        )
    if len(header) < header_bytes:
        raise DataError(
            f"wanted a header of {header_bytes} bytes, got {len(header)} bytes in {path}; {_FETCH_AGAIN}"
        )
    shape = struct.unpack(f">{num_dims}I", header[4:])
    if 0 in shape:
        raise DataError(
            f"wanted at least one value, got sizes {'x'.join(map(str, shape))} in {path}; "
            f"{_FETCH_AGAIN}"
        )
    return shape


def _read_values(file: BinaryIO | gzip.GzipFile, path: Path, *, shape: tuple[int, ...]) -> Tensor:
    wanted_bytes = math.prod(shape)
    # One byte more than wanted reveals a longer file without reading all of it.
    content = bytearray()
    for chunk in _chunks(file, wanted_bytes + 1):
        content += chunk
    if len(content) != wanted_bytes:
        got = "more" if len(content) > wanted_bytes else f"{len(content)} bytes"
        raise DataError(
            f"wanted {wanted_bytes} bytes of values for sizes {'x'.join(map(str, shape))}, got {got} "
            f"in {path}; {_FETCH_AGAIN}"
        )
    # Without a copy, as the tensor keeps the bytearray that it is made of.
    return torch.frombuffer(content, dtype=torch.uint8).reshape(shape)


def _chunks(file: BinaryIO | gzip.GzipFile, limit_bytes: int) -> Iterator[bytes]:
    """At most `limit_bytes` of a file; a header that lies about its sizes allocates nothing."""
    left = limit_bytes
    while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
        left -= len(chunk)
        yield chunk
