"""Sparse gradients over NCCL: the mean of their rows, and training as one process on the CPU has it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrun import torchrun

sys.path.append(str(Path(__file__).parents[1] / "sync"))

import sparse_worker
from sparse_setups import BEYOND_DDP, TRAINED

PROGRAM = Path(__file__).parent / "sparse_program.py"
WORKERS = [count for count in (2, 4) if count <= torch.cuda.device_count()]
CASES = 40
"""Of random gradients: so many on every machine."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not WORKERS, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


def layout_of(case: dict[str, Any]) -> str:
    """Of the gradient of the first table."""
    skipped = case.get("skips") == "all"
    if case["model"] == "tied":
        return "torch.sparse_coo" if skipped else "torch.strided"
    return "none" if skipped else "torch.sparse_coo"


@pytest.mark.parametrize("workers", WORKERS or [2])
def test_rows_are_exchanged_over_gpus(workers: int, tmp_path: Path) -> None:
    """Random gradients of all kinds, and trainings beside one process that makes the mean itself."""
    output = tmp_path / "found.json"
    torchrun(workers, PROGRAM, output, CASES)
    told = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(workers)]
    assert len(told[0]["means"]) == CASES
    for answers in zip(*(one["means"] for one in told), strict=True):
        assert all(one["means"] == answers[0]["means"] for one in answers)
        sparse_worker.check_means(answers[0]["case"], answers[0]["means"], workers)
    for name, case in {**TRAINED, **BEYOND_DDP}.items():
        found = told[0]["trained"][name]
        assert found["same"], name
        assert found["gap"] < 1e-5, name
        assert found["kind"] == layout_of(case), name
