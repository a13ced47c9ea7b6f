"""Makes the shared strategies importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
