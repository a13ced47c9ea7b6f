"""What each Python process that the tests start does first, since this folder is in their `PYTHONPATH`.

Importing torch and its compiler makes 400,000 objects that stay. At Python's own threshold, 700, the collector looks
at them a hundred times and more meanwhile: a quarter of the seconds of a process that does little else (2.3 s of CPU
for torch and `ridgeline.runtime.training.loop`, of which 0.6 s).
"""

import gc

OBJECTS = 50_000
"""Made since the last collection, before the next: what a test leaves in cycles is still collected as it runs."""

gc.set_threshold(OBJECTS, 10, 10)
