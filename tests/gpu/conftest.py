"""What tests on GPUs share: an alarm for hidden waits, and small programs."""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture
def no_hidden_wait() -> Iterator[Callable[[], None]]:
    """Call it, and from there to the end of the test an operation for which the host waits is an error."""

    def begin() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")
