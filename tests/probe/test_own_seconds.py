"""What this process and its children use of the processors, which no other program does."""

import subprocess
import sys

from ridgeline.probe.host.load import own_seconds

BUSY_CHILD = """
import sys, time
while time.process_time() < 0.2: pass
print(flush=True)
sys.stdin.read()
"""


def test_seconds_of_processors_are_those_of_children_too() -> None:
    """A child counts while it runs."""
    before_s = own_seconds()
    command = [sys.executable, "-c", BUSY_CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used_s = own_seconds() - before_s
        child.kill()
    assert used_s > 0.1
