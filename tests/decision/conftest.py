"""Makes the shared modules importable, and hosts as fast as usual."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from ridgeline.decision import trial


@pytest.fixture(autouse=True)
def usual_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no trial waits for it: their steps are counted."""
    monkeypatch.setattr(trial, "HOST_SPEED", SimpleNamespace(wait=lambda *_: True))
