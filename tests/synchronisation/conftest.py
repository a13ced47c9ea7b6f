"""Makes the shared strategies importable, and loads their profile of hypothesis."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import strategies  # noqa: F401 - the path above makes it importable
