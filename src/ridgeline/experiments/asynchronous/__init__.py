"""The experiment `async`: a front end that queues work and continues, and a back end that does it.

The seeds' law: with t1 to issue an operation, t2 to compute it and t3 to return its result, N operations
take N (t1 + t2 + t3) one by one and t1 + N t2 + t3 when queued. And its price: a queue that nobody
paces fills the memory.
"""

from ridgeline.experiments.asynchronous.experiment import run as run

__all__ = ("run",)
