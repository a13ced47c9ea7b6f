"""What a step costs the host beyond its replay: each cause is found apart, and is charged to what has it."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_replay import op, spec, workload_of

from ridgeline.probe.operators.host_costs import (
    Beyond,
    HostCosts,
    _solved,
    host_costs,
    module_calls,
)
from ridgeline.probe.operators.small_step import PHASES
from ridgeline.workload import Op, Parameter, Workload

figures = st.floats(1e-7, 1e-4)
savings = st.floats(-1e-5, 1e-6)
COSTS = st.builds(
    HostCosts,
    forward_op=savings,
    module_call=figures,
    backward_op=savings,
    gradient=figures,
    step=figures,
    parameter=figures,
    update_op=savings,
)


def step_of(modules: list[str], backward: int, updates: int, parameters: int) -> Workload:
    """Operators of the modules in forward; every parameter's gradient is ready after the last of backward."""
    one = op("aten.add.Tensor", [spec(1)], {"args": [{"tensor": 0}, 1], "kwargs": {}})

    def phased(phase: str, module: str = "") -> Op:
        return msgspec.structs.replace(one, phase=phase, module=module)

    ops = [phased("forward", module) for module in modules]
    ops += [phased("backward")] * backward + [phased("optimizer")] * updates
    parameter = Parameter(
        name="w",
        shape=(1,),
        dtype="float32",
        num_bytes=4,
        is_trainable=True,
        ready_op=len(modules) + backward - 1,
    )
    frozen = msgspec.structs.replace(parameter, is_trainable=False, ready_op=-1)
    return msgspec.structs.replace(
        workload_of(), ops=tuple(ops), parameters=(*[parameter] * parameters, frozen)
    )


@pytest.mark.parametrize(
    ("paths", "calls"),
    [
        (["", "", ""], [0, 0, 0]),
        (["gru"] * 1000, [1] + [0] * 999),
        (["layers.0", "layers.1", "layers.1"], [1, 1, 0]),
        (["body.layers.0.norm", "body.layers.0.linear", "head", ""], [3, 1, 1, 0]),
        (["a.b", "a", "a.b"], [2, 0, 1]),
    ],
)
def test_modules_are_called_where_paths_change(paths: list[str], calls: list[int]) -> None:
    """A number counts with the name before it, and going back to a module above is no call."""
    assert module_calls(paths) == calls


@given(COSTS, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_each_cause_is_charged_once(
    costs: HostCosts, modules: int, backward: int, updates: int, parameters: int
) -> None:
    """Whatever the operators are, a phase has its own costs, those of parameters that are frozen left out."""
    paths = [f"layers.{number}" for number in range(modules)] + [f"layers.{modules - 1}"]
    shares = costs.of(step_of(paths, backward, updates, parameters))
    forward, back = shares[: modules + 1], shares[modules + 1 : modules + 1 + backward]
    assert sum(forward) == pytest.approx(
        (modules + 1) * costs.forward_op + modules * costs.module_call, abs=1e-12
    )
    assert sum(back) == pytest.approx(
        backward * costs.backward_op + parameters * costs.gradient, abs=1e-12
    )
    assert sum(shares[modules + 1 + backward :]) == pytest.approx(
        costs.step + parameters * costs.parameter + updates * costs.update_op, abs=1e-12
    )


def test_an_optimizer_in_one_operator_costs_its_loop() -> None:
    """And so does one of hundreds of operators: the cost of a step is shared, not multiplied."""
    costs = HostCosts(0.0, 0.0, 0.0, 0.0, step=6e-5, parameter=1e-6, update_op=0.0)
    for count in (1, 404):
        assert sum(costs.of(step_of([""], 1, count, 3))) == pytest.approx(6.3e-5)
    without = step_of([""], 1, 0, 3)
    assert costs.of(without) == [0.0, 0.0]


@given(COSTS)
def test_planted_costs_are_found(costs: HostCosts) -> None:
    """From steps in which they are as they are planted."""

    def beyond(forward: int, backward: int, update: int, modules: int, parameters: int) -> Beyond:
        seconds = {
            "forward": forward * costs.forward_op + modules * costs.module_call,
            "backward": backward * costs.backward_op,
            "optimizer": costs.step + parameters * costs.parameter + update * costs.update_op,
        }
        if modules:  # a chain has too few parameters for them to show
            seconds["backward"] += parameters * costs.gradient
        counts = dict(zip(PHASES, (forward, backward, update), strict=True))
        return Beyond(seconds, counts, modules, parameters)

    found = _solved(
        beyond(181, 480, 1, 0, 2),
        beyond(49, 129, 1, 25, 32),
        beyond(61, 160, 1, 0, 2),
        beyond(61, 160, 1, 0, 40),
        beyond(61, 160, 120, 0, 40),
    )
    for mine, planted in zip(found, costs, strict=True):
        assert mine == pytest.approx(planted, abs=1e-11)


def test_they_are_measured_here() -> None:
    """Finite figures; the same in all of a process."""
    found = host_costs("cpu")
    assert all(map(math.isfinite, found))
    assert host_costs("cpu") is found
    assert min(found.module_call, found.gradient, found.step, found.parameter) >= 0.0
