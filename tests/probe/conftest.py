"""Makes the tests' own modules importable, here and in the worker processes that tests start."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from answered_requests import asked as asked


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share the cores with others: one thread is fair, and repeatable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
