"""Asynchronous execution with dependency tracking."""

from ridgeline.runtime.engine.engine import Engine as Engine
from ridgeline.runtime.engine.statistics import EngineStatistics as EngineStatistics
from ridgeline.runtime.engine.task import EngineTask as EngineTask
from ridgeline.runtime.engine.variable import Variable as Variable
