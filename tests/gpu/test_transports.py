"""Every algorithm makes the mean over GPUs as well: eagerly, and in graphs that are replayed with other values."""

import json
from pathlib import Path

import pytest
import torch

from torchrun import torchrun

SCRIPT = Path(__file__).parent / "transport_cases.py"
WORKERS = [count for count in (2, 4, 8) if count <= torch.cuda.device_count()]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not WORKERS, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("workers", WORKERS or [2])
def test_means_over_gpus_are_exact(workers: int, tmp_path: Path) -> None:
    """Within rounding of the mean in double precision, and the same bits on all workers."""
    output = tmp_path / "found.json"
    torchrun(workers, SCRIPT, output)
    told = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(workers)]
    refused = {name: cases["refused"] for name, cases in told[0].items() if "refused" in cases}
    assert not refused
    assert {
        "all_reduce",
        "ring",
        "rings",
        "tree",
        "two_shot",
        "copy_engine",
        "sharded, in halves",
    } <= told[0].keys()
    far = {
        (name, case, when): gap
        for name, cases in told[0].items()
        for case, found in cases.items()
        for when, gap in found["gaps"].items()
        if gap > 1.0
    }
    assert not far
    for other in told[1:]:
        for name, cases in told[0].items():
            for case, found in cases.items():
                assert other[name][case]["bits"] == found["bits"], (name, case)
