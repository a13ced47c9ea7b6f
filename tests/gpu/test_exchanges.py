"""Every way to exchange gradients that GPUs are offered trains over NCCL, eagerly and in a captured graph."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS

PROGRAM = Path(__file__).parent / "exchange_program.py"
EXACT, LOSSY = 1e-4, 0.2
"""How far parameters may be from those of the all-reduce, of their own size."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_all_ways_train_and_are_captured(tmp_path: Path) -> None:
    """Exact ones near the all-reduce, lossy ones not far, all workers with the same bits."""
    output = tmp_path / "found.json"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(output.read_text()) if output.exists() else {}
    assert done.returncode == 0, f"{found}\n{done.stderr[-3000:]}"
    wrong = {}
    for way, result in found.items():
        name = way.partition(" / ")[0]
        if "gap" in result:
            entry = ALGORITHMS.get(name) or COMPRESSIONS.get(name)
            limit = EXACT if entry is not None and entry.is_exact else LOSSY
            if result["gap"] > limit or not result["same"]:
                wrong[way] = result
        elif way != "toys":
            wrong[way] = result
    assert not wrong
    assert len(found) > 4
