"""Makes the shared modules importable, loads their profile of hypothesis, and registers toy entries."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))

import strategies  # noqa: F401 - the path above makes it importable
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy entries stand in the tables, and no other losses; what a test makes of them goes with them."""
    from toy_entries import GOSSIP, HALF

    for name, entry in COMPRESSIONS.items():
        if not entry.is_exact:
            monkeypatch.setitem(COMPRESSIONS, name, entry._replace(codec=""))
    monkeypatch.setitem(ALGORITHMS, "gossip", GOSSIP)
    monkeypatch.setitem(COMPRESSIONS, "half", HALF)
