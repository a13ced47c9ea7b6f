"""Makes the tests' own modules importable, here and in the worker processes that tests start."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from answered_requests import asked as asked

from one_thread import one_thread as one_thread
