"""Text as bytes in memory: the sources of Python's own standard library, or text files of a directory.

A token is a byte (0 to 255), so that no tokenizer and no vocabulary file is needed. That is enough to
measure and to watch a language model learn; a model that is to be used wants a better tokenizer.
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ridgeline.errors import DataError

NUM_BYTES = 256
"""Different tokens."""
TEST_EVERY = 10
"""One file of so many, beginning with the first, is held out for the test."""
MOST_BUNDLED_BYTES = 4_000_000
"""Of the standard library's sources; more would only make a run's epochs longer."""


class TextData(Dataset[tuple[Tensor, Tensor]]):
    """Map-style dataset of (tokens int64 [T], next tokens int64 [T]): the text cut into windows.

    Windows follow each other without overlap; the last bytes that fill no window are left out. The
    text stays bytes in memory.

    The text is uint8 [N].
    """

    def __init__(self, text: Tensor, *, sequence_length: int) -> None:
        self.text = text
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        # No token follows the last one.
        return max(0, len(self.text) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, following = self.batch(torch.tensor([index]))
        return tokens[0], following[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """A collated batch: tokens and next tokens, int64 [N, T] each, of int64 indices [N].

        Cost: allocates the batch; one gather instead of a Python loop over samples.
        """
        starts = indices.unsqueeze(1) * self.sequence_length
        window = self.text[starts + torch.arange(self.sequence_length + 1)].to(torch.int64)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Text:
    """Training and test windows of one source."""

    train: TextData
    test: TextData


def load_text(data_dir: str | Path | None = None, *, sequence_length: int) -> Text:
    """Windows of the `*.txt` files in `data_dir`, or of the standard library's sources when it is None.

    Files are taken in the order of their names. Every tenth, beginning with the first, is for the test;
    a single file is cut, its last tenth is for the test.

    Args:
        data_dir: Directory with UTF-8 text files; those in directories below it are not read.
        sequence_length: Bytes of a window.

    Raises:
        DataError: the directory or its files are missing, empty, too short or not UTF-8, or the
            sources of the standard library are not there.
    """
    where, texts = _bundled() if data_dir is None else _files_of(Path(data_dir))
    if len(texts) == 1:
        cut = len(texts[0]) - len(texts[0]) // TEST_EVERY
        train, test = [texts[0][:cut]], [texts[0][cut:]]
    else:
        test = list(texts[::TEST_EVERY])
        train = [text for index, text in enumerate(texts) if index % TEST_EVERY]
    return Text(
        train=_windows(train, sequence_length, f"training text from {where}"),
        test=_windows(test, sequence_length, f"test text from {where}"),
    )


def _windows(texts: Sequence[bytes], sequence_length: int, what: str) -> TextData:
    joined = b"".join(texts)
    if len(joined) <= sequence_length:
        raise DataError(
            f"wanted at least {sequence_length + 1} bytes of {what}, got {len(joined)}; add text, or "
            "take a shorter sequence_length"
        )
    # In a bytearray, since torch warns of memory that it may not write to.
    text = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    return TextData(text, sequence_length=sequence_length)


def _files_of(directory: Path) -> tuple[str, list[bytes]]:
    """The directory's name and the content of its text files."""
    if not directory.is_dir():
        raise DataError(
            f"wanted a directory with .txt files, got no directory at {directory}; give the path of one"
        )
    paths = sorted(path for path in directory.glob("*.txt") if path.is_file())
    if not paths:
        raise DataError(
            f"wanted .txt files, got none in {directory}; put UTF-8 text there, in files ending in .txt"
        )
    return str(directory), [_read(path) for path in paths]


def _read(path: Path) -> bytes:
    """The bytes of a text file."""
    content = path.read_bytes()
    if not content:
        raise DataError(f"wanted text, got an empty file at {path}; remove it or fill it")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"wanted UTF-8 text, got byte 0x{content[error.start]:02x} at position {error.start} of "
            f"{path}; convert the file, for example with iconv"
        ) from error
    return content


def _bundled() -> tuple[str, list[bytes]]:
    """What every installation has: the modules at the top of Python's standard library, by name."""
    directory = Path(sysconfig.get_path("stdlib"))
    texts: list[bytes] = []
    room = MOST_BUNDLED_BYTES
    for path in sorted(directory.glob("*.py")):
        content = path.read_bytes()[:room]
        if content:
            texts.append(content)
        room -= len(content)
    if len(texts) < 2:
        raise DataError(
            f"wanted the sources of Python's standard library as text, got {len(texts)} files in "
            f"{directory}; give .txt files with `--data DIR`"
        )
    return str(directory), texts
