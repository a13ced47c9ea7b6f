"""A result that cannot be written is refused before anything is measured."""

import argparse
import errno
import os
import re
import stat
from pathlib import Path

import pytest

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.cli.main import main
from ridgeline.codec import write_atomically


@pytest.mark.parametrize(
    "verb", ["measure", "plan mlp", "trace mlp", "bench memory", "scaling run"]
)
def test_a_directory_is_refused_before_anything_is_done(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names it, and nothing is written beside it."""
    assert main([*verb.split(), "-o", str(tmp_path)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(
        f"error: argument -o/--output: wanted a file to write, got the directory {tmp_path}; name a file in "
        "it"
    )
    assert list(tmp_path.iterdir()) == []


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    """A file takes the place of what stands there, which must not happen to /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for wanted in (Path(os.devnull), pipe):
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            output_file(str(wanted))
        assert str(refused.value) == (
            f"wanted a file to write, got the device or pipe {wanted}; name a file, or leave this out"
        )


def test_a_name_that_the_system_refuses_is_refused(tmp_path: Path) -> None:
    """With the system's reason."""
    wanted = tmp_path / ("a" * 300)
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        output_file(str(wanted))
    assert str(refused.value) == (
        f"wanted a file to write, got {wanted} (File name too long); name another"
    )


def test_a_file_is_no_place_for_files(tmp_path: Path) -> None:
    """However deep what is asked for would lie below it."""
    file = tmp_path / "file"
    file.write_text("kept")
    wanted = file / "below" / "result.json"
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        output_file(str(wanted))
    assert str(refused.value) == (
        f"wanted a file to write, got {wanted}, and {file} is not a directory; name another"
    )
    assert file.read_text() == "kept"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="wants files that the system keeps")
def test_a_place_where_no_file_can_be_made_is_refused() -> None:
    """Also to a superuser, who may write everywhere; of a directory that is still to be made, by that above."""
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        output_file("/proc/new/result.json")
    assert re.fullmatch(
        r"wanted a file to write, got /proc/new/result\.json, and nothing may be written in /proc "
        r"\([\w ]+\); name another",
        str(refused.value),
    )


def test_files_that_are_new_or_to_be_replaced_are_taken(tmp_path: Path) -> None:
    """Nothing is made yet."""
    old = tmp_path / "old.json"
    old.write_text("{}")
    new = tmp_path / "deep" / "new.json"
    assert [output_file(str(path)) for path in (old, new)] == [old, new]
    assert not new.parent.exists()
    assert old.read_text() == "{}"


def test_a_directory_that_was_made_meanwhile_stays(tmp_path: Path) -> None:
    """What is written fails with the path that was given, and leaves nothing beside it."""
    place = tmp_path / "results"
    place.mkdir()
    with pytest.raises(IsADirectoryError, match=re.escape(f"Is a directory: '{place}'")):
        write_atomically(place, b"{}")
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("at", [None, "of the temporary file"])
def test_errors_name_the_file_that_was_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str | None
) -> None:
    """A full disk says of no file that it is full, and nobody knows the temporary one."""

    def full(handle: int) -> None:
        name = None if at is None else str(next(tmp_path.glob(".new.json.*")))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    monkeypatch.setattr(os, "fsync", full)
    place = tmp_path / "new.json"
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{place}'")):
        write_atomically(place, b"{}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_who_may_read_a_result_is_said_by_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """As of any file, also where it replaces one."""
    place = tmp_path / "new.json"
    place.write_bytes(b"old")
    before = os.umask(umask)
    try:
        write_atomically(place, b"{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == mode
