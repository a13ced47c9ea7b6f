"""A script in a fork of the warm process has what it would have had, and ends as it would have ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from warm import WARM

SCRIPT = """
import os, signal, sys
print(sys.argv[1:], os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), "torch" in sys.modules)
print(signal.getsignal(signal.SIGCHLD).name)
print("an error", file=sys.stderr)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raises":
    raise ValueError("wrong")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("word", "status"), [("0", 0), ("3", 3), ("raises", 1), ("killed", -9)])
def test_a_script_runs_as_if_started(tmp_path: Path, word: str, status: int) -> None:
    """Arguments, folder, environment, streams, signals and exit status; only torch is there before it begins."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('print("an', 'sys.stdout.flush()\nprint("an'))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GIVEN": "given"}
    command = WARM.command(script, word, environment=environment)
    assert command[0] == sys.executable
    assert command[1] != str(script)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        input="read",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stdout == f"['{word}'] {tmp_path} given read True\nSIG_DFL\n"
    assert done.stderr.startswith("an error\n")
    assert ("ValueError: wrong" in done.stderr) is (word == "raises")


@pytest.mark.parametrize(
    "variables",
    [{"CUDA_VISIBLE_DEVICES": "0"}, {"OMP_NUM_THREADS": "2"}, {"TORCH_LOGS": "all"}],
)
def test_what_is_read_at_import_starts_a_script_as_ever(variables: dict[str, str]) -> None:
    """The warm process has imported with other variables."""
    usual = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert WARM.command("script.py", environment=usual)[1] == "-I"
    found = WARM.command("script.py", 7, environment={**usual, **variables})
    assert found == [sys.executable, "script.py", "7"]
