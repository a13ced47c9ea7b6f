"""Plans that replay the model alone: searched where no graph can hold the whole step, and only there."""

import msgspec
import pytest

from chained_workloads import make_chain
from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.execution import MODES
from ridgeline.planner import choose
from ridgeline.planner.knobs import MODEL_GRAPHS, enumerate_plans, make_request
from ridgeline.simulator.step import simulate
from ridgeline.workload import TensorSpec
from strategies import make_machine


class Tries:
    """Trials that take what is predicted, but for modes that fail."""

    def __init__(self, machine, workload, failures) -> None:
        self.machine, self.workload, self.failures = machine, workload, failures
        self.executions: list[str] = []

    def __call__(self, plan):
        self.executions.append(plan.execution)
        if plan.execution in self.failures:
            raise self.failures[plan.execution]
        timeline = simulate(self.machine, self.workload, plan, details=False)
        return msgspec.structs.replace(timeline, origin="measured")


def chosen(failures, named=None, **more):
    machine = make_machine(device="cuda", dispatch_s=1e-3, launch_s=1e-3, rate=1e11)
    workload = make_chain((30, 30), device="cuda", elements=1 << 12)
    if named is not None:
        first = msgspec.structs.replace(workload.ops[0], **named)
        workload = msgspec.structs.replace(workload, ops=(first, *workload.ops[1:]))
    trial = Tries(machine, workload, failures)
    return choose(machine, workload, world_size=1, trial=trial, **more), trial.executions


def test_where_a_graph_holds_the_step_nobody_replays_the_model() -> None:
    ranking, tried = chosen({})
    assert "graph" in tried
    assert not {c.plan.execution for c in ranking.candidates} & set(MODEL_GRAPHS)


def test_an_obstacle_in_the_step_has_the_model_replayed() -> None:
    ranking, tried = chosen({"graph": ObstacleError("wanted a loss without .item()")})
    assert "model-graph" in tried
    assert MODES[ranking.best.plan.execution].replays_model
    whole = [c for c in ranking.candidates if MODES[c.plan.execution].is_replayed_on("cuda")]
    assert all(c.failure for c in whole)


@pytest.mark.parametrize(("module", "is_tried"), [("layers.0", False), ("", True)])
def test_sizes_that_depend_on_values_within_the_model_are_an_obstacle(
    module: str, is_tried: bool
) -> None:
    """No graph holds them, so that no child spends seconds to find out; the loss is outside of a model's graph."""
    obstacle = {"graph": ObstacleError("wanted a model without nonzero()")}
    ranking, tried = chosen(obstacle, {"name": "aten.nonzero.default", "module": module})
    assert ("model-graph" in tried) is is_tried
    assert is_tried or not {c.plan.execution for c in ranking.candidates} & set(MODEL_GRAPHS)


def test_an_obstacle_in_the_model_leaves_eager_and_compiled() -> None:
    failures = {name: ObstacleError("in the model") for name in ("graph", "model-graph")}
    ranking, tried = chosen(failures)
    assert "compiled+model-graph" not in tried
    assert ranking.best.plan.execution in ("eager", "compiled")
    failure = next(
        c.failure for c in ranking.candidates if c.plan.execution == "compiled+model-graph"
    )
    assert failure == "not tried, since 1 worker, model-graph failed: in the model"


def test_a_model_that_cannot_be_read_is_captured_once() -> None:
    """Trials are few: another precision of a model that could not be captured takes none."""
    no = CaptureError("wanted a program that can be read in one piece")
    failures = {"graph": ObstacleError("no"), "model-graph": no, "compiled+model-graph": no}
    ranking, tried = chosen(failures, allow=("bf16",), tries=99)
    for name in MODEL_GRAPHS:
        assert tried.count(name) <= 1, name
    assert ranking.best.plan.execution in ("eager", "compiled")


def test_a_model_that_does_not_compile_may_be_replayed_as_it_is() -> None:
    failures = {"graph": ObstacleError("no"), "compiled+model-graph": CaptureError("compiler")}
    ranking, tried = chosen(failures, tries=99)
    assert "model-graph" in tried
    assert ranking.best.plan.execution != "compiled+model-graph"


def test_a_capture_that_failed_otherwise_adds_nothing() -> None:
    ranking, _ = chosen({"graph": CaptureError("out of memory")})
    assert not {c.plan.execution for c in ranking.candidates} & set(MODEL_GRAPHS)


@pytest.mark.parametrize(
    ("precision", "formats"), [("bf16", {"as-is"}), (None, {"as-is", "channels_last"})]
)
def test_channels_last_plans_are_of_a_precision_that_was_traced_so(precision, formats) -> None:
    """Or of any, where nothing was traced so."""
    workload = make_chain(device="cuda")
    shapes = ((2, 3, 8, 8), (4, 3, 3, 3))
    specs = tuple(
        TensorSpec(shape=s, stride=(s[1] * s[2] * s[3], s[2] * s[3], s[3], 1), dtype="float32")
        for s in shapes
    )
    image = msgspec.structs.replace(workload.ops[0], family="convolution", inputs=specs)
    workload = msgspec.structs.replace(workload, ops=(image, *workload.ops[1:]))
    if precision:
        variant = msgspec.structs.replace(
            workload, precision=precision, memory_format="channels_last"
        )
        workload = msgspec.structs.replace(workload, variants=(variant,))
    request = make_request(
        make_machine(device="cuda"), workload, 1, {"execution": "graph"}, ("bf16",)
    )
    plans, _ = enumerate_plans(request)
    assert {p.memory_format for p in plans if p.precision == "as-is"} == formats
    assert {p.memory_format for p in plans if p.precision == "bf16"} == {"as-is", "channels_last"}


def test_an_error_of_any_kind_in_a_capture_costs_its_plan() -> None:
    """One in the step itself is the user's, and raised as it is."""
    ranking, tried = chosen({"graph": RuntimeError("odd: 1\nmore")})
    assert "eager" in tried
    failed = next(c for c in ranking.candidates if c.plan.execution == "graph")
    assert failed.failure == "RuntimeError: odd: 1"
    with pytest.raises(ZeroDivisionError, match="mine"):
        chosen({"graph": RuntimeError("odd"), "eager": ZeroDivisionError("mine")})


@pytest.mark.parametrize("fixed", [{"execution": "graph"}, {"accumulate": 2}])
def test_what_the_user_fixed_stays(fixed) -> None:
    if "execution" in fixed:
        with pytest.raises(Exception, match="wanted a plan that runs"):
            chosen({"graph": ObstacleError("no")}, fixed=fixed)
        return
    ranking, _ = chosen({"graph": ObstacleError("no")}, fixed=fixed)
    assert not {c.plan.execution for c in ranking.candidates} & set(MODEL_GRAPHS)
