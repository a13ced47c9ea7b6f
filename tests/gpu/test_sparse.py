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

PROGRAM = Path(__file__).parent / "sparse_program.py"
WORKERS = [count for count in (2, 4) if count <= torch.cuda.device_count()]
SECONDS = 5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not WORKERS, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


def check_means(told: list[dict[str, Any]], size: int) -> None:
    """What each parameter was given is the mean of what the workers drew, and of its kind."""
    case = told[0]["case"]
    assert all(one["means"] == told[0]["means"] for one in told)
    brought = [sparse_worker.drawn(rank, case) for rank in range(size)]
    for place, found in enumerate(told[0]["means"]):
        own = [gradients[place] for gradients in brought]
        kinds = {kinds[place] for kinds in case["kinds"]}
        wanted = "dense" if "dense" in kinds else "none" if kinds == {"none"} else "rows"
        assert found["kind"] == wanted, case
        if wanted == "none":
            continue
        dense = [g.to_dense().double() if g is not None else torch.zeros(()) for g in own]
        mean = torch.tensor(found["mean"], dtype=torch.float64)
        # Small whole numbers add up exactly; halves and quarters of them are exact as well.
        assert torch.equal(mean, sum(dense, torch.zeros(())).expand_as(mean) / size), case


@pytest.mark.parametrize("workers", WORKERS or [2])
def test_rows_are_exchanged_over_gpus(workers: int, tmp_path: Path) -> None:
    """Random gradients of all kinds, and trainings beside one process that makes the mean itself."""
    output = tmp_path / "found.json"
    torchrun(workers, PROGRAM, output, SECONDS)
    told = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(workers)]
    assert len(told[0]["means"]) > 10
    for answers in zip(*(one["means"] for one in told), strict=True):
        check_means([*answers], workers)
    for name, found in told[0]["trained"].items():
        assert found["same"], name
        assert found["gap"] < 1e-5, name
        assert found["kind"] == ("torch.strided" if name == "tied" else "torch.sparse_coo"), name
