"""Makes the reference models importable, and leaves what a trace sets aside to it."""

import gc
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]


@pytest.fixture(autouse=True)
def lasting_objects_set_aside() -> None:
    """None here, as in a user's process: a trace sets them aside for its own time, if nobody else has."""
    gc.unfreeze()
