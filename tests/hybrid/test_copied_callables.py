"""Copies of a `Hybrid`: a model that holds one may be copied with it, as for averaged weights."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ridgeline as rl
from adversary.interpreting import interpreted
from ridgeline.errors import PlanError

MESSAGE = (
    "wanted something to copy or pickle, got a Hybrid, whose programs call the callable that it was made of; "
    "copy that, and hybridize(...) the copy; save(path) writes it with its parameters"
)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_by_name(copied: Callable[[Any], Any], mode: Any) -> None:
    """A copy in eager mode called the model that was copied, whatever became of its own."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with interpreted(), rl.hybridize(model, x, mode=mode) as fast:
        for held in (fast, nn.ModuleList([model]), [fast]):
            if isinstance(held, nn.Module):
                held.fast = fast
            with pytest.raises(PlanError) as error:
                copied(held)
            assert str(error.value) == MESSAGE
        assert copy.copy(fast) is fast
        torch.testing.assert_close(fast(x), model(x).detach())
