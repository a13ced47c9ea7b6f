"""Every codec trains over gloo, with two, three and four workers, as a step of one's own uses it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from codec_cases import KINDS
from test_codec_laws import CODECS

SCRIPT = Path(__file__).parent / "codec_cases.py"
WORKERS = (2, 3, 4)
NAMES = tuple(f"{name} {options}" for name, options in CODECS)
FAR = 0.5
"""How far a parameter may be from that of plain training, after a few steps of 0.1."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What worker 0 found, by number of workers; one start for each."""
    told = {}
    for workers in WORKERS:
        output = tmp_path_factory.mktemp("codecs") / "found.json"
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers))
        done = subprocess.run(
            [sys.executable, *command, str(SCRIPT), str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        told[workers] = json.loads(output.read_text())
    return told


@pytest.mark.parametrize("name", NAMES)
def test_all_workers_hold_the_same_bits_near_plain_training(
    found: dict[int, dict[str, Any]], name: str
) -> None:
    """In float32 and bfloat16, accumulated and clipped, and where a worker leaves parameters out."""
    for workers in WORKERS:
        for kind in KINDS:
            told, plain = found[workers][name][kind], found[workers]["none {}"][kind]
            assert told["same"], (workers, kind)
            assert told["finite"], (workers, kind)
            pairs = zip(told["parameters"], plain["parameters"], strict=True)
            assert 0.0 < max(abs(a - b) for a, b in pairs) < FAR, (workers, kind)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_step_are_those_predicted(found: dict[int, dict[str, Any]], name: str) -> None:
    """To the byte, in every kind of step; without compression as well."""
    for workers in WORKERS:
        for kind in KINDS:
            for told in (found[workers][name][kind], found[workers]["none {}"][kind]):
                assert told["counted"] == told["predicted"], (workers, kind)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_trains_as_a_job_of_its_own(found: dict[int, dict[str, Any]], name: str) -> None:
    """Two of three or four workers come to the bits of two."""
    alone = found[2][name]["plain"]["parameters"]
    for workers in (3, 4):
        assert found[workers][name]["group"]["parameters"] == alone


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_where_it_was_stopped(found: dict[int, dict[str, Any]], name: str) -> None:
    """With the bits of a run that was not: what a codec remembers is in checkpoints."""
    assert found[2][name]["resumed"] == {
        "equal": True,
        "steps": ["step-0000024", "step-0000024"],
        "was_stopped": True,
    }
