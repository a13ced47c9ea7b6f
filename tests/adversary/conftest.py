"""Makes the adversary importable as a package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
