"""Makes shared modules importable, and has no busy host take part in what is logged."""

import math
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import strategies  # noqa: F401 - loads the profile of hypothesis
from ridgeline.runtime.kvstore.serving.worker import outages


@pytest.fixture(autouse=True)
def no_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late a server in a thread of a test answers, none is told of that no test has made."""
    monkeypatch.setattr(outages, "OUTAGE_S", math.inf)
