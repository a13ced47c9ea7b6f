"""Makes the tests' shared modules importable, and gives them a machine profile of round numbers."""

import sys
from pathlib import Path

import pytest

# As in tests/cli: before a test puts others in their place.
import ridgeline.probe.attempts
import ridgeline.probe.fields  # noqa: F401

sys.path.append(str(Path(__file__).parents[1]))


@pytest.fixture
def machine_file(tmp_path: Path) -> Path:
    """A profile of this kind of machine, so that no test has to measure one."""
    from strategies import make_machine

    return make_machine().save(tmp_path / "profile.json")
