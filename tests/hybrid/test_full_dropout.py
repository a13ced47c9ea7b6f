"""Dropout of everything draws nothing, in steps that torch's compiler makes as in those that are written."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ridgeline.plan import Plan
from ridgeline.programs.draws import drop_all_without_draws
from ridgeline.runtime.steps.step import PlannedStep

X = torch.tensor([1.0, float("nan"), 3.0])


@pytest.fixture(autouse=True)
def interpreted_programs(interpreted: None) -> None:
    torch._dynamo.reset()


def _graph(arguments: tuple[Any, ...], options: dict[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    node = graph.call_function(functional.dropout, (graph.placeholder("x"), *arguments), options)
    graph.output(node)
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("arguments", "options"), [((1.0,), {}), ((), {"p": 1.0}), ((1.0, True, True), {})]
)
def test_dropping_everything_is_a_product_with_zero(
    arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """As it is where nothing is compiled; in place, too."""
    module, wanted, got = _graph(arguments, options), X.clone(), X.clone()
    drop_all_without_draws(module)
    results = [functional.dropout(wanted, *arguments, **options), module(got)]
    torch.testing.assert_close(*results, equal_nan=True)
    torch.testing.assert_close(wanted, got, equal_nan=True)
    assert functional.dropout not in {node.target for node in module.graph.nodes}


@pytest.mark.parametrize("arguments", [(0.5,), (0.0,), (1.0, False)])
def test_other_dropout_stays(arguments: tuple[Any, ...]) -> None:
    """Also where it is off."""
    module = _graph(arguments, {})
    drop_all_without_draws(module)
    assert functional.dropout in {node.target for node in module.graph.nodes}


def _states(execution: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    with PlannedStep(
        model, lambda m, x: m(x).square().mean(), optimizer, Plan(execution=execution)
    ) as step:
        for share in (0.5, 1.0, 1.0, 0.5, 0.5):
            model[1].p = share
            found += [step(torch.ones(2, 4)), torch.get_rng_state()]
    return found


def test_a_schedule_of_dropout_may_end_with_everything() -> None:
    """Steps behind it draw what they would have drawn."""
    torch.testing.assert_close(_states("compiled"), _states("eager"))
