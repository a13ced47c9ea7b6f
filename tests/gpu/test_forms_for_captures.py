"""On a GPU, where fused forms are other kernels: what an optimizer does in a graph is what a script's does."""

from typing import Any

import pytest
import torch

from forms_for_captures import CASES, gap
from ridgeline.optimizer_forms import NOT_FUSED_ON_GPU
from ridgeline.optimizers.capturable import INEXACT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "settings"), [case for case in CASES if case[0] not in NOT_FUSED_ON_GPU]
)
def test_forms_for_captures_are_the_same_update(
    name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """But for those that step outside of graphs."""
    apart = gap(name, settings, dtype, "cuda")
    assert apart > 1e-3 if name in INEXACT else apart < 1e-4
