"""The form that an optimizer takes in a graph is the same update as the one that a script runs.

The check of a captured step cannot see that: it sets replays beside steps by the same form.
"""

from typing import Any

import pytest
import torch

from emulated_graphs import emulated_graphs
from forms_for_captures import CASES, gap
from ridgeline.optimizers.capturable import INEXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_forms_for_captures_are_the_same_update(
    name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """But for those that step outside of graphs, whatever rule is chosen and however far training has come."""
    with emulated_graphs():
        apart = gap(name, settings, dtype, "cpu")
    if name in INEXACT:
        assert apart > 1e-3  # else torch has cured it, and a graph may hold it
    else:
        assert apart < 1e-4
