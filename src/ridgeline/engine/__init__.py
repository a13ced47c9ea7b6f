"""Asynchronous execution with dependency tracking."""

from ridgeline.engine.engine import Engine as Engine
from ridgeline.engine.statistics import EngineStatistics as EngineStatistics
from ridgeline.engine.task import EngineTask as EngineTask
from ridgeline.engine.variable import Variable as Variable
