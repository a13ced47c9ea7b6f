"""The black box: what a killed worker leaves behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.errors import FileFormatError
from ridgeline.workers.blackbox import SIZE, BlackBox, read_moment


def test_last_moment_is_read(tmp_path: Path) -> None:
    """The reader sees the step and the frame that began last."""
    box = BlackBox(tmp_path / "deep" / "rank-0.bin")
    box.step(7)
    box.frame("all_reduce/3")
    moment = read_moment(tmp_path / "deep" / "rank-0.bin")
    box.close()
    assert moment is not None
    assert (moment.step, moment.frame) == (7, "all_reduce/3")
    assert moment.time_ns > 0


def test_moment_survives_sigkill(tmp_path: Path) -> None:
    """What was written is there after the writer was killed without warning."""
    program = (
        "import sys, pathlib, time\n"
        "from ridgeline.workers.blackbox import BlackBox\n"
        "box = BlackBox(pathlib.Path(sys.argv[1])); box.step(3); box.frame('backward/1')\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    path = tmp_path / "box"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    moment = read_moment(path)
    assert moment is not None
    assert (moment.step, moment.frame) == (3, "backward/1")


def test_long_names_are_cut(tmp_path: Path) -> None:
    """A record keeps its size whatever the name."""
    box = BlackBox(tmp_path / "box")
    box.frame("x" * 100)
    box.close()
    assert (tmp_path / "box").stat().st_size == SIZE
    moment = read_moment(tmp_path / "box")
    assert moment is not None
    assert moment.frame == "x" * 40


def test_no_box_is_no_moment(tmp_path: Path) -> None:
    """A worker that never came to its first step left nothing, which is not an error."""
    assert read_moment(tmp_path / "none") is None


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A file of something else is named."""
    (tmp_path / "box").write_bytes(b"hello")
    with pytest.raises(FileFormatError, match="wanted a black box of 64 bytes, got 5 bytes"):
        read_moment(tmp_path / "box")
