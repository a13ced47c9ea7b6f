"""Makes the graphs of this folder and the shared strategies importable, with their profile of hypothesis."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

import strategies  # noqa: F401 - the path above makes it importable
