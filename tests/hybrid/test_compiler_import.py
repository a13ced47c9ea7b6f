"""torch's compiler is imported beside what this process waits for, in a process that has not yet done so."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from ridgeline.programs.compiler_import import COMPILER, importing_compiler

assert COMPILER not in sys.modules
count = threading.active_count()
with importing_compiler({device!r}):
    pass
assert threading.active_count() == count
print(COMPILER in sys.modules)
"""


@pytest.mark.parametrize(("device", "is_imported"), [("cuda", "True"), ("cpu", "False")])
def test_it_is_there_when_the_waiting_ends(device: str, is_imported: str) -> None:
    """For a GPU, where plans that compile are tried; on a CPU they seldom are."""
    command = [sys.executable, "-c", PROGRAM.format(device=device)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, is_imported), done.stderr
