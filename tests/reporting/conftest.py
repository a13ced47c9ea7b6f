"""Sample nouns as fixtures: one step of a small ResNet-18 on two CPU workers, predicted and measured."""

import sys
from pathlib import Path

import pytest

from ridgeline.history import History
from ridgeline.machine import Machine
from ridgeline.planner import Ranking
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict, verify
from ridgeline.workload import Workload

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))

from sample_machine import make_machine  # the path above makes them importable
from sample_run import make_history, make_ranking, make_timeline
from sample_workload import make_workload


@pytest.fixture(scope="session")
def machine() -> Machine:
    return make_machine()


@pytest.fixture(scope="session")
def workload() -> Workload:
    return make_workload()


@pytest.fixture(scope="session")
def predicted(workload: Workload) -> Timeline:
    return make_timeline(workload)


@pytest.fixture(scope="session")
def measured(workload: Workload) -> Timeline:
    return make_timeline(workload, "measured")


@pytest.fixture(scope="session")
def history() -> History:
    return make_history()


@pytest.fixture(scope="session")
def verdict(
    machine: Machine, workload: Workload, predicted: Timeline, measured: Timeline
) -> Verdict:
    return verify(predicted, measured, machine=machine, workload=workload)


@pytest.fixture(scope="session")
def ranking(predicted: Timeline, measured: Timeline) -> Ranking:
    return make_ranking(predicted, measured)
