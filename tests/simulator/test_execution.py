"""The table of execution modes: what runtime, simulator and planner agree on."""

import pytest

from ridgeline.errors import PlanError
from ridgeline.execution import (
    MODES,
    SPINS,
    check_alone,
    check_offered,
    offered,
    thread_variables,
    waiting_as_here,
)
from ridgeline.plan import Execution


def test_what_a_gpu_replays() -> None:
    """Modes with a graph are replayed on a GPU, and so is a step that is one program; on a CPU nothing is."""
    replayed = {name for name, mode in MODES.items() if mode.is_replayed_on("cuda")}
    assert replayed == {"graph", "compiled+graph", "regional+graph", "step-graph", "packaged"}
    assert not any(mode.is_replayed_on("cpu") for mode in MODES.values())


def test_what_compiles() -> None:
    """Compile time is to be earned back wherever torch's compiler has a part in the program."""
    plain = {name for name, mode in MODES.items() if not mode.is_compiled}
    assert plain == {"eager", "script", "graph", "model-graph"}
    assert {n for n, m in MODES.items() if m.is_one_program} == {"step-graph", "packaged"}


def test_steps_are_offered_all_but_scripts() -> None:
    """A training step runs in every mode but TorchScript; a CPU replays no graphs."""
    assert set(offered("step", "cuda")) == set(MODES) - {"script"}
    assert not any("graph" in name and name != "step-graph" for name in offered("step", "cpu"))
    with pytest.raises(PlanError):
        check_offered("script", "step", "cuda")
    assert check_offered("packaged", "step", "cpu").form == "packaged"


@pytest.mark.parametrize("name", list(MODES))
def test_one_program_is_for_one_worker(name: Execution) -> None:
    """Only a step that is one program, or replays its model, refuses company."""
    check_alone(name, 1)
    if MODES[name].is_one_program:
        with pytest.raises(PlanError, match="exchanges no gradients"):
            check_alone(name, 2)
    elif MODES[name].replays_model:
        with pytest.raises(PlanError, match="replays the model alone on one worker"):
            check_alone(name, 2)
    else:
        check_alone(name, 2)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "7"}, {}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}),
    ],
)
def test_idle_threads_wait_as_the_user_says(given: dict[str, str], added: dict[str, str]) -> None:
    """Or, where nothing is said, for a moment only before they sleep; their number is the plan's."""
    assert thread_variables(0, given) == added
    count = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    assert thread_variables(3, given) == count | added


def test_a_child_of_a_process_that_trains_waits_as_that_does() -> None:
    """As the environment says, or as OpenMP does by itself: not as workers do that are started to train."""
    as_usual = waiting_as_here({})
    assert as_usual == {"GOMP_SPINCOUNT": "300000"}
    assert thread_variables(0, {}) | as_usual == as_usual
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        assert waiting_as_here({name: "given"}) == {}
