"""CUDA is asked for as many queues as it has, unless the user asked for others."""

import os
import subprocess
import sys

import pytest

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(("theirs", "wanted"), [(None, "32"), ("1", "1")])
def test_importing_asks_for_queues(theirs: str | None, wanted: str) -> None:
    """Before CUDA starts, which reads it then."""
    environment = {name: value for name, value in os.environ.items() if name != QUEUES}
    environment |= {} if theirs is None else {QUEUES: theirs}
    code = f"import os, ridgeline; print(os.environ[{QUEUES!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == wanted
