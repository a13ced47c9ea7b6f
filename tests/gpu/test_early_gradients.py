"""Gradients of compiled steps leave while backward goes on, and only when they are there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrun import torchrun

PROGRAM = Path(__file__).parent / "early_program.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("execution", ["compiled+graph", "regional+graph"])
def test_gradients_leave_early_and_whole(execution: str, tmp_path: Path) -> None:
    """Parameters are those of the eager step, and the first transfer begins before backward is over."""
    torchrun(2, PROGRAM, tmp_path / "result.json", execution)
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert result["gap"] < 1e-9
    frames = result["frames"]
    assert frames["all_reduce/0"][0] < frames["wait"][0] - 0.2 * (
        frames["wait"][0] - frames["backward/0"][0]
    )


def test_a_gradient_that_leaves_too_early_is_noticed(tmp_path: Path) -> None:
    """The check before use tells: what the test above rests on."""
    done = torchrun(2, PROGRAM, tmp_path / "result.json", "compiled+graph", "careless", check=False)
    assert done.returncode != 0
    assert "EquivalenceError" in done.stderr
