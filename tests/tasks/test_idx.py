"""IDX files: what is written is read, and every kind of damage is named before anything starts."""

import gzip
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import DataError
from ridgeline.tasks.idx import IMAGES_MAGIC, LABELS_MAGIC, read_split

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"
FETCH_AGAIN = "the file is damaged or cut short, fetch it again"


def idx(magic: int, sizes: tuple[int, ...], values: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + values


def write(
    directory: Path,
    *,
    images: bytes | None = None,
    labels: bytes | None = None,
    suffix: str = "",
) -> Path:
    """Two images of 2x3 pixels with labels 7 and 1, either file replaced by what is given."""
    if images is None:
        images = idx(IMAGES_MAGIC, (2, 2, 3), bytes(range(12)))
    if labels is None:
        labels = idx(LABELS_MAGIC, (2,), bytes([7, 1]))
    for name, content in ((IMAGES, images), (LABELS, labels)):
        packed = gzip.compress(content) if suffix else content
        (directory / f"{name}{suffix}").write_bytes(packed)
    return directory


def refused(directory: Path, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_split(directory, "train")
    assert str(caught.value) == message


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_read_back(tmp_path: Path, suffix: str) -> None:
    """Values come back in their shape, plain and compressed alike."""
    images, labels = read_split(write(tmp_path, suffix=suffix), "train")
    assert torch.equal(images, torch.arange(12, dtype=torch.uint8).reshape(2, 2, 3))
    assert torch.equal(labels, torch.tensor([7, 1]))


def test_plain_before_compressed(tmp_path: Path) -> None:
    """Where a plain and a compressed file stand side by side, the plain one is read."""
    write(tmp_path, suffix=".gz")
    write(tmp_path, labels=idx(LABELS_MAGIC, (2,), bytes([3, 4])))
    assert read_split(tmp_path, "train")[1].tolist() == [3, 4]


def test_missing_directory(tmp_path: Path) -> None:
    """A directory that is not there is named."""
    refused(
        tmp_path / "nowhere",
        f"wanted a directory with IDX files, got no directory at {tmp_path / 'nowhere'}; give the one "
        "that holds train-images-idx3-ubyte[.gz] and its three companions",
    )


@pytest.mark.parametrize("name", [IMAGES, LABELS])
def test_missing_file(tmp_path: Path, name: str) -> None:
    """A missing file is named with both spellings."""
    write(tmp_path)
    (tmp_path / name).unlink()
    refused(
        tmp_path,
        f"wanted {name} or {name}.gz, got neither in {tmp_path}; put the four IDX files of one data "
        "set there",
    )


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_wrong_magic(tmp_path: Path, suffix: str) -> None:
    """Labels in the place of images are refused by their magic number."""
    write(tmp_path, images=idx(LABELS_MAGIC, (2,), bytes(2)), suffix=suffix)
    refused(
        tmp_path,
        "wanted magic number 0x00000803 (unsigned bytes, 3 dimensions), got 0x00000801 in "
        f"{tmp_path / (IMAGES + suffix)}; this is another kind of file, check its name",
    )


@pytest.mark.parametrize("num_bytes", [0, 3, 15])
def test_cut_header(tmp_path: Path, num_bytes: int) -> None:
    """A file that ends inside its header is refused."""
    write(tmp_path, images=idx(IMAGES_MAGIC, (2, 2, 3), b"")[:num_bytes])
    refused(
        tmp_path,
        f"wanted a header of 16 bytes, got {num_bytes} bytes in {tmp_path / IMAGES}; {FETCH_AGAIN}",
    )


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_cut_values(tmp_path: Path, suffix: str) -> None:
    """A file with fewer values than its header promises is refused."""
    write(tmp_path, images=idx(IMAGES_MAGIC, (2, 2, 3), bytes(11)), suffix=suffix)
    refused(
        tmp_path,
        "wanted 12 bytes of values for sizes 2x2x3, got 11 bytes in "
        f"{tmp_path / (IMAGES + suffix)}; {FETCH_AGAIN}",
    )


def test_huge_sizes(tmp_path: Path) -> None:
    """A header that promises more than any memory holds is answered by the bytes that are there."""
    huge = 2**32 - 1
    write(tmp_path, images=idx(IMAGES_MAGIC, (huge, huge, huge), bytes(5)))
    refused(
        tmp_path,
        f"wanted {huge**3} bytes of values for sizes {huge}x{huge}x{huge}, got 5 bytes in "
        f"{tmp_path / IMAGES}; {FETCH_AGAIN}",
    )


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_trailing_bytes(tmp_path: Path, suffix: str) -> None:
    """A file with more values than its header promises is refused."""
    write(tmp_path, labels=idx(LABELS_MAGIC, (2,), bytes(3)), suffix=suffix)
    refused(
        tmp_path,
        f"wanted 2 bytes of values for sizes 2, got more in {tmp_path / (LABELS + suffix)}; "
        f"{FETCH_AGAIN}",
    )


def test_empty_data(tmp_path: Path) -> None:
    """A data set without images is refused."""
    write(tmp_path, images=idx(IMAGES_MAGIC, (0, 2, 3), b""))
    refused(
        tmp_path,
        f"wanted at least one value, got sizes 0x2x3 in {tmp_path / IMAGES}; {FETCH_AGAIN}",
    )


def test_counts_differ(tmp_path: Path) -> None:
    """Images and labels of different data sets are refused, with both numbers."""
    write(tmp_path, labels=idx(LABELS_MAGIC, (3,), bytes(3)))
    refused(
        tmp_path,
        f"wanted one label per image, got 2 images in {tmp_path / IMAGES} and 3 labels in "
        f"{tmp_path / LABELS}; put files of one data set there",
    )


def test_label_out_of_range(tmp_path: Path) -> None:
    """A label that is not a digit is refused, with the place of the first."""
    write(tmp_path, labels=idx(LABELS_MAGIC, (2,), bytes([9, 10])))
    refused(
        tmp_path,
        f"wanted labels 0 to 9, got label 10 at index 1 in {tmp_path / LABELS}; the built-in tasks know 10 "
        "classes: write a task file for more, or fetch the file again if it is damaged",
    )


def damaged_gzip(tmp_path: Path, content: bytes) -> str:
    write(tmp_path, suffix=".gz")
    (tmp_path / f"{IMAGES}.gz").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_split(tmp_path, "train")
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_damaged_gzip(tmp_path: Path) -> None:
    """A compressed file that does not decompress is refused, wherever the damage is."""
    whole = gzip.compress(idx(IMAGES_MAGIC, (2, 2, 3), bytes(range(12))))
    wrong_sum = whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]
    wrong_stream = whole[:12] + bytes([255, 255, 255]) + whole[15:]
    for content in (b"not gzip at all", whole[:-3], wrong_sum, wrong_stream):
        message = damaged_gzip(tmp_path, content)
        assert re.fullmatch(
            r"wanted a gzip file, got a stream that does not decompress \(.+\) in "
            + re.escape(f"{tmp_path / IMAGES}.gz; {FETCH_AGAIN}"),
            message,
        )


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the system does not let us read is a data error with the system's reason."""
    write(tmp_path)

    def refuse(self: Path, mode: str = "r") -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    refused(
        tmp_path,
        f"wanted a readable file, got Permission denied for {tmp_path / IMAGES}; check its "
        "permissions and its disk",
    )


@given(
    count=st.integers(1, 5),
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    is_compressed=st.booleans(),
    data=st.data(),
)
def test_any_shape(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    height: int,
    width: int,
    is_compressed: bool,
    data: st.DataObject,
) -> None:
    """Reading undoes writing for every shape."""
    num_values = count * height * width
    values = data.draw(st.binary(min_size=num_values, max_size=num_values))
    digits = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    directory = write(
        tmp_path_factory.mktemp("idx"),
        images=idx(IMAGES_MAGIC, (count, height, width), values),
        labels=idx(LABELS_MAGIC, (count,), bytes(digits)),
        suffix=".gz" if is_compressed else "",
    )
    images, labels = read_split(directory, "train")
    assert images.shape == (count, height, width)
    assert bytes(images.flatten().tolist()) == values
    assert labels.tolist() == digits
