"""Saved programs that were damaged are refused, or compute what they did; `damaged_packages.py` loads thousands."""

from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_packages import Damaged, save_callable, save_step


@pytest.mark.parametrize("save", [save_callable, save_step])
def test_damaged_files_are_refused_or_unharmed(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Bits, stretches, cuts and shifts, half of them where the file says what is where."""
    damaged = Damaged(save(tmp_path), 1)
    for _ in range(200):
        damaged.one()
    assert damaged.wrong == []
    assert damaged.counts["refused"] > 150
    assert damaged.counts["unharmed"] < 20


def test_members_that_begin_elsewhere_are_refused_or_unharmed(tmp_path: Path) -> None:
    """Also those by which torch knows the file, of which its own reader in Python refuses some."""
    damaged = Damaged(save_callable(tmp_path), 1)
    damaged.misplaced()
    assert damaged.wrong == []
    assert damaged.counts["refused"] > 300
