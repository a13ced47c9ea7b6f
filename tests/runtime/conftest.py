"""Makes the random programs of the engine importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
