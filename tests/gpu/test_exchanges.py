"""Every way to exchange gradients that GPUs are offered trains over NCCL, eagerly and in a captured graph."""

import json
from pathlib import Path

import pytest
import torch

from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS
from torchrun import torchrun

PROGRAM = Path(__file__).parent / "exchange_program.py"
LATE = "late means"
EXACT, LOSSY = 1e-4, 0.2
"""How far parameters may be from those of the all-reduce, of their own size."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_all_ways_train_and_are_captured(tmp_path: Path) -> None:
    """Exact ones near the all-reduce, lossy ones not far, all workers with the same bits."""
    output = tmp_path / "found.json"
    done = torchrun(2, PROGRAM, output, check=False, NVIDIA_TF32_OVERRIDE="0")
    found = json.loads(output.read_text()) if output.exists() else {}
    assert done.returncode == 0, f"{found}\n{done.stderr[-3000:]}"
    wrong = {}
    for way, result in found.items():
        name = way.partition(" / ")[0]
        if "gap" in result:
            entry = ALGORITHMS.get(name) or COMPRESSIONS.get(name)
            is_exact = name == LATE or (entry is not None and entry.is_exact)
            limit = EXACT if is_exact else LOSSY
            if result["gap"] > limit or not result["same"]:
                wrong[way] = result
        elif way != "toys":
            wrong[way] = result
    assert not wrong
    assert len(found) > 4
    assert {f"{LATE} / eager", f"{LATE} / compiled"} <= found.keys()
