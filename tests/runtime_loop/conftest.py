"""Makes the tests' own modules importable, here and in the worker processes that tests start."""

import sys
from pathlib import Path

# Runs are compared bitwise.
from one_thread import one_thread as one_thread

sys.path.append(str(Path(__file__).parent))
