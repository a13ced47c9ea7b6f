"""Makes shared modules importable."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import strategies  # noqa: F401 - loads the profile of hypothesis
