"""Asynchronous execution with dependency tracking."""

from ridgeline.runtime.engine.engine import Engine as Engine
from ridgeline.runtime.engine.variable import Task as Task
from ridgeline.runtime.engine.variable import Variable as Variable
