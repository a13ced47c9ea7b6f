"""Ridgeline makes PyTorch training as fast as the machine allows, and shows the distance that is left.

The public names are imported on first use, so that `import ridgeline` costs milliseconds and no torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from ridgeline.codec import VERSION as __version__  # noqa: N811 - the dunder is Python's

if TYPE_CHECKING:
    from ridgeline import laws as laws
    from ridgeline import tasks as tasks
    from ridgeline.autoparallel.parallelize import Parallel as Parallel
    from ridgeline.autoparallel.parallelize import parallelize as parallelize
    from ridgeline.callables.hybridize import Hybrid as Hybrid
    from ridgeline.callables.hybridize import hybridize as hybridize
    from ridgeline.engine import Engine as Engine
    from ridgeline.feeding import feed as feed
    from ridgeline.feeding import to_host as to_host
    from ridgeline.machine import Machine as Machine
    from ridgeline.plan import Feed as Feed
    from ridgeline.plan import Layout as Layout
    from ridgeline.plan import Plan as Plan
    from ridgeline.plan import Sync as Sync
    from ridgeline.planner import Ranking as Ranking
    from ridgeline.planner import choose as choose
    from ridgeline.probe.measure import measure as measure
    from ridgeline.probe.timing import benchmark as benchmark
    from ridgeline.reporting.report import report as report
    from ridgeline.runtime import kvstore as kvstore
    from ridgeline.runtime.steps.load import load as load
    from ridgeline.runtime.training.task import Task as Task
    from ridgeline.session import TrainStep as TrainStep
    from ridgeline.simulator.step import simulate as simulate
    from ridgeline.timeline import Timeline as Timeline
    from ridgeline.tracing.capture import trace as trace
    from ridgeline.verdict import Verdict as Verdict
    from ridgeline.verdict import verify as verify
    from ridgeline.workload import Workload as Workload

# Read when CUDA starts. With 8 queues, its default, branches of a captured step wait for each other that do
# not depend on each other: the sixth exchange of GPT-2's gradients waited for the end of backward.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_HOMES = {
    "Engine": "ridgeline.engine",
    "Feed": "ridgeline.plan",
    "Hybrid": "ridgeline.callables.hybridize",
    "Layout": "ridgeline.plan",
    "Machine": "ridgeline.machine",
    "Parallel": "ridgeline.autoparallel.parallelize",
    "Plan": "ridgeline.plan",
    "Ranking": "ridgeline.planner",
    "Sync": "ridgeline.plan",
    "Task": "ridgeline.runtime.training.task",
    "Timeline": "ridgeline.timeline",
    "TrainStep": "ridgeline.session",
    "Verdict": "ridgeline.verdict",
    "Workload": "ridgeline.workload",
    "benchmark": "ridgeline.probe.timing",
    "choose": "ridgeline.planner",
    "feed": "ridgeline.feeding",
    "hybridize": "ridgeline.callables.hybridize",
    "kvstore": "ridgeline.runtime.kvstore",
    "laws": "ridgeline.laws",
    "load": "ridgeline.runtime.steps.load",
    "measure": "ridgeline.probe.measure",
    "parallelize": "ridgeline.autoparallel.parallelize",
    "report": "ridgeline.reporting.report",
    "simulate": "ridgeline.simulator.step",
    "tasks": "ridgeline.tasks",
    "to_host": "ridgeline.feeding",
    "trace": "ridgeline.tracing.capture",
    "verify": "ridgeline.verdict",
}
_MODULES = ("kvstore", "laws", "tasks")

__all__ = ("__version__", *sorted(_HOMES))  # noqa: PLE0604 - names come from the table above


def __getattr__(name: str) -> Any:
    """Import the home of a public name on its first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
