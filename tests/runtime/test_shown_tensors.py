"""Tensors that a step makes anew in each call and shows under a name; graphs are emulated on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.plan import Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep


def test_layers_whose_weights_are_made_in_each_call_are_captured() -> None:
    """What autograd keeps of the weight that is shown would keep the stream of the calls before."""
    found, kept = [], []
    for execution in ("eager", "graph"):
        torch.manual_seed(0)
        with pytest.warns(FutureWarning, match="weight_norm"):
            model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for node in accumulating(model[0].weight):
            node.metadata["is first"] = True
        del node
        plan = Plan(execution=execution)
        with emulated_graphs(), PlannedStep(model, squared, optimizer, plan, device="cpu") as step:
            for index in range(EAGER_STEPS + 3):
                step(torch.full((4, 6), 0.1 * index))
                assert model[0].weight.requires_grad
        kept.append(["is first" in node.metadata for node in accumulating(model[0].weight)])
        found.append([*model.parameters(), model[0].weight.detach()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert kept == [[True, True], [False, False]], "eager steps reuse what is kept"


def accumulating(tensor: Tensor) -> list[Any]:
    """Where autograd adds up gradients that come through a tensor."""
    nodes, found = [tensor.grad_fn], []
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            found.append(node)
        nodes += [following for following, _ in getattr(node, "next_functions", ()) if following]
    return found


def squared(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch) - 1.0).square().mean()
