"""Requests that `choose` cannot honour, each refused with what it could."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_loads import make_loads

from ridgeline.codec import decode, encode
from ridgeline.errors import PlanError
from ridgeline.plan import Plan
from ridgeline.planner import choose
from strategies import make_machine, make_workload


def _refused(message: str, **arguments: object) -> object:
    return pytest.param(arguments, message, id=message[:40])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        _refused(
            "wanted fixed knobs out of workers, threads, execution, precision, memory_format, "
            "optimizer, kernels, random, accumulate, algorithm, compression, every, bucket_bytes, depth, "
            "options, got 'worker'; correct its name",
            fixed={"worker": 2},
        ),
        _refused(
            "wanted workers as a whole number >= 1, got 0; correct it",
            fixed={"workers": 0},
        ),
        _refused(
            "wanted accumulate as a whole number >= 1, got 1.5; correct it",
            fixed={"accumulate": 1.5},
        ),
        _refused(
            "wanted bucket_bytes as bytes >= 1 or a tuple of them, got (0,); for example 4194304",
            fixed={"bucket_bytes": (0,)},
        ),
        _refused(
            "wanted bucket_bytes as bytes >= 1 or a tuple of them, got '4MB'; for example 4194304",
            fixed={"bucket_bytes": "4MB"},
        ),
        _refused(
            "wanted an execution mode for a training step on cpu out of eager, compiled, regional, step-graph, "
            "packaged, got 'graph'; choose one of those",
            fixed={"execution": "graph"},
        ),
        _refused(
            "wanted an execution mode for a training step on cpu out of eager, compiled, regional, step-graph, "
            "packaged, got 'script'; choose one of those",
            fixed={"execution": "script"},
        ),
        _refused(
            "wanted workers=1 for execution='step-graph', got workers=2 in the plan; a step that is one "
            "program exchanges no gradients: use one worker, or another mode",
            fixed={"execution": "step-graph", "workers": 2},
        ),
        _refused(
            "wanted precision to be one of 'as-is', 'bf16' on cpu, got 'tf32'; this release runs no other "
            "there",
            fixed={"precision": "tf32"},
        ),
        _refused(
            "wanted allow to name changes of the maths out of tf32, bf16, random, compression, local-steps, got "
            "'magic'; leave it out",
            allow=("magic",),
        ),
        _refused("wanted steps as a whole number >= 1, got 0; correct it", steps=0),
        _refused("wanted steps as a whole number >= 1, got -5; correct it", steps=-5),
        _refused("wanted steps as a whole number >= 1, got nan; correct it", steps=float("nan")),
        _refused("wanted world_size as a whole number >= 1, got 0; correct it", world_size=0),
        _refused("wanted world_size as a whole number >= 1, got 2.5; correct it", world_size=2.5),
        _refused(
            "wanted a workload for workers=3, got workloads for [1, 2] workers; trace the step with the "
            "batch of a worker at that number",
            fixed={"workers": 3},
        ),
    ],
)
def test_impossible_requests(arguments: dict, message: str) -> None:
    """What cannot be honoured is refused with what could."""
    with pytest.raises(PlanError) as error:
        choose(make_machine(), make_loads(), **arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("count", [0, -1, 1.5, "1", True])
def test_workloads_are_for_whole_numbers_of_workers(count: object) -> None:
    """A key that is no number of workers is named."""
    with pytest.raises(PlanError) as error:
        choose(make_machine(), {count: make_workload()})
    assert str(error.value) == (
        f"wanted the number of workers of a workload as a whole number >= 1, got {count!r}; correct it"
    )


@given(
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 10**6),
    st.sampled_from([None, {"workers": 2}, {"execution": "eager"}]),
)
def test_every_answer_is_a_plan_that_can_be_saved(
    world_size: int | None, steps: int | None, fixed: dict[str, object] | None
) -> None:
    """Whatever whole numbers are given, the best plan has as many workers and survives its file."""
    if fixed == {"workers": 2}:
        world_size = None
    best = choose(
        make_machine(), make_workload(), world_size=world_size, steps=steps, fixed=fixed
    ).best.plan
    assert best.workers == (2 if fixed == {"workers": 2} else world_size or 1)
    assert decode(Plan, encode(best), where="plan.json") == best


def test_contradicting_numbers_of_workers() -> None:
    """One workload cannot run on two numbers of workers."""
    with pytest.raises(PlanError) as error:
        choose(make_machine(), make_workload(), world_size=2, fixed={"workers": 1})
    assert str(error.value) == (
        "wanted one number of workers, got fixed workers=1 and world_size=2; give one of them"
    )
