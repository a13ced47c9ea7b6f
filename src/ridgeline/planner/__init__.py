"""The planner: which plan is fastest on this machine, and why."""

from ridgeline.planner.ranking import Candidate as Candidate
from ridgeline.planner.ranking import Ranking as Ranking
from ridgeline.planner.search import choose as choose

__all__ = ("Candidate", "Ranking", "choose")
