"""What `simulate` refuses to predict: plans that no step can be run with, and steps without operators."""

import msgspec
import pytest

from ridgeline.errors import PlanError, WorkloadError
from ridgeline.plan import Layout, Plan, Sync
from ridgeline.simulator.step import simulate
from strategies import make_machine, make_workload


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            Plan(execution="graph"),
            (
                "wanted an execution mode for a training step on cpu out of eager, compiled, regional, "
                "step-graph, packaged, got 'graph'; choose one of those"
            ),
        ),
        (
            Plan(execution="script"),
            (
                "wanted an execution mode for a training step on cpu out of eager, compiled, regional, "
                "step-graph, packaged, got 'script'; choose one of those"
            ),
        ),
        (
            Plan(execution="packaged", workers=2),
            (
                "wanted workers=1 for execution='packaged', got workers=2 in the plan; a step that is one "
                "program exchanges no gradients: use one worker, or another mode"
            ),
        ),
        (
            Plan(workers=2, sync=Sync(compression="topk", options={"density": 0.5})),
            (
                "wanted sync.options['density'] < 1/2 = 0.5 with 2 workers, got 0.5 in the plan: each "
                "worker would receive 4 bytes for an element of a gradient, where 4 do without compression; "
                "lower it, or leave the compression out"
            ),
        ),
        (
            Plan(sync=Sync(algorithm="kvstore", options={"servers": 1})),
            (
                "wanted sync.options['kind']='dist_async' for sync.options['servers'], got 'dist_sync' in "
                "the plan; set it, or leave the option out"
            ),
        ),
        (
            Plan(sync=Sync(every=4)),
            (
                "wanted sync.every=1 for workers=1, got 4 in the plan; a single worker exchanges nothing: "
                "leave it out, or use more workers"
            ),
        ),
        (
            Plan(workers=2, layout=Layout(tensor=2)),
            (
                "wanted all workers along the data axis, got Layout(data=1, shard=1, tensor=2, pipeline=1) "
                "in the plan; this release runs data parallelism only"
            ),
        ),
        (
            Plan(precision="fp16"),
            (
                "wanted precision to be one of 'as-is', 'tf32', 'bf16', got 'fp16' in the plan; this release "
                "runs no other"
            ),
        ),
        (
            Plan(precision="tf32"),
            "wanted a CUDA device for precision='tf32', got cpu; use precision='as-is' there",
        ),
        (
            Plan(accumulate=9),
            "wanted at least accumulate=9 samples in a worker's batch, got 8 in toy; lower accumulate",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(plan: Plan, message: str) -> None:
    """No prediction is made for what no step can be run with."""
    with pytest.raises(PlanError) as error:
        simulate(make_machine(), make_workload(), plan)
    assert str(error.value) == message


def test_an_empty_workload_is_refused() -> None:
    """There is no step without operators."""
    with pytest.raises(WorkloadError) as error:
        simulate(make_machine(), msgspec.structs.replace(make_workload(), ops=()), Plan())
    assert str(error.value) == (
        "wanted a workload with operators, got none in toy; trace the step again"
    )
