"""Where a verb or a benchmark writes its result: refused before it measures for minutes, not after."""

import argparse
import tempfile
from pathlib import Path


def output_file(text: str) -> Path:
    """A path where a file can be written, for argparse.

    Raises:
        argparse.ArgumentTypeError: a directory, a device or a pipe stands there, or nothing can be made where
            it is to be.
    """
    path = Path(text)
    try:
        _check(path)
    except OSError as error:  # a name too long, links in a circle
        raise argparse.ArgumentTypeError(
            f"wanted a file to write, got {path} ({error.strerror}); name another"
        ) from None
    return path


def add_file_argument(parser: argparse.ArgumentParser, words: str, *flags: str) -> None:
    """A file that is written besides: `-o` or `--output` unless other flags are given."""
    named = flags or ("-o", "--output")
    parser.add_argument(*named, type=output_file, metavar="FILE", help=words)


def _check(path: Path) -> None:
    if path.is_dir():
        raise argparse.ArgumentTypeError(
            f"wanted a file to write, got the directory {path}; name a file in it"
        )
    if path.exists() and not path.is_file():  # which the new file would replace
        raise argparse.ArgumentTypeError(
            f"wanted a file to write, got the device or pipe {path}; name a file, or leave this out"
        )
    # The nearest that is there, since missing directories are made when the file is written.
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(
            f"wanted a file to write, got {path}, and {above} is not a directory; name another"
        )
    try:
        # Tried, not asked for: a superuser is told that all may be written, in /proc and the like, too.
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"wanted a file to write, got {path}, and nothing may be written in {above} ({error.strerror}); "
            "name another"
        ) from None
